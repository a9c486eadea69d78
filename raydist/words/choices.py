"""What a group offers beyond its files: scale=2x8, any torchvision model, any job; a source for Hydra. (driver)"""

from __future__ import annotations

import functools
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import Container, OmegaConf

from raydist.config import Job
from raydist.errors import ConfigError
from raydist.words import lookup

SIZE = re.compile(r"(\d+)(?:\.\.(\d+))?x(\d+)|(\d+)\.\.(\d+)")
MODEL = re.compile(r"^@register_model\(.*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


@functools.cache
def torchvision_models() -> tuple[str, ...]:
    """The image models of the torchvision that is installed, read from its files: importing it takes seconds."""
    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return ()
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return tuple(sorted(name for file in files for name in MODEL.findall(file.read_text(encoding="utf-8"))))


def schema() -> Container:
    """The settings as OmegaConf holds them, with their types and defaults."""
    config: Container = OmegaConf.structured(Job)
    _thaw(config)
    return config


def _thaw(node: Any) -> None:
    # frozen dataclasses become read-only nodes, each on its own, and nothing could be composed into them
    OmegaConf.set_readonly(node, None)
    for key in node:
        if OmegaConf.is_config(child := node._get_node(key)):
            _thaw(child)


class Choices(ConfigSource):
    """Configs made up from their names: `scale/2x8`, `model/resnet18`, `job/path/to/file.py:function`."""

    @staticmethod
    def scheme() -> str:
        return "raydist"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in ("", "scale", "model", "job")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        match group:
            case "schema":
                return not name
            case "scale":
                return SIZE.fullmatch(name) is not None
            case "model":
                return name in torchvision_models()
            case "job":
                return bool(name) and (not lookup.is_name(name) or name in lookup.job_names())
        return False

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        group, _, name = config_path.partition("/")
        # the header is what a file would say in `# @package`
        header = {"package": "_global_" if group == "job" else None}
        return ConfigResult(provider=self.provider, path=self.full_path(), config=_make(group, name), header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names = {"": ["job", "model", "scale"], "model": [*torchvision_models()], "job": lookup.job_names()}
        kind = ObjectType.CONFIG if config_path else ObjectType.GROUP
        return names.get(config_path.rstrip("/"), []) if results_filter in (None, kind) else []


def _make(group: str, name: str) -> Container:
    match group:
        case "schema":
            return schema()
        case "scale":
            return OmegaConf.create(size(name))
        case "model":
            return OmegaConf.create({"_target_": f"torchvision.models.{name}", "weights": None})
    return OmegaConf.create({"job": {"target": name}})


def size(word: str) -> dict[str, int]:
    """`2x8`: 2 nodes with 8 ranks each. `2..8x4`: 2 to 8 nodes with 4 each; `2..8` leaves open how many."""
    match = SIZE.fullmatch(word)
    assert match is not None, word
    found = {"nodes": match[1] or match[4], "max_nodes": match[2] or match[5], "per_node": match[3]}
    made = {name: int(number) for name, number in found.items() if number}
    nodes, most, per_node = made["nodes"], made.get("max_nodes", 1), made.get("per_node", 1)
    if min(nodes, most, per_node) < 1:
        span = f"{nodes or 1}..{max(nodes, most, 1)}" if "max_nodes" in made else str(nodes or 1)
        each = f"x{per_node or 1}" if "per_node" in made else ""
        raise ConfigError(f"scale={word}: {nodes} nodes with {per_node} ranks each is nothing; say scale={span}{each}")
    return made
