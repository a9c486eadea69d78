"""A config source for choices without a file: scale=2x8, any model, optimizer, job. (driver)"""

from __future__ import annotations

import copy
import functools
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import Container, OmegaConf

from raydist.settings import targets
from raydist.settings.config import Job
from raydist.shared.errors import ConfigError

SIZE = re.compile(r"(\d+)(?:\.\.(\d+))?x(\d+)|(\d+)\.\.(\d+)")
OPTIMIZER = re.compile(r"\w+(\.\w+)+")
MODEL = re.compile(r"^@register_model\(.*\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)


@functools.cache
def torchvision_models() -> tuple[str, ...]:
    """Return the image models of the installed torchvision.

    They are read from its files, because importing it takes seconds.
    """
    spec = PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return ()
    files = (Path(spec.origin).parent / "models").glob("*.py")
    return tuple(
        sorted(name for file in files for name in MODEL.findall(file.read_text(encoding="utf-8")))
    )


def schema() -> Container:
    """Return the settings as an OmegaConf config, with their types and defaults."""
    return copy.deepcopy(_schema())  # a copy takes a tenth of the time


@functools.cache
def _schema() -> Container:
    config: Container = OmegaConf.structured(Job)
    _make_writable(config)
    return config


def _make_writable(node: Any) -> None:
    # OmegaConf makes each frozen dataclass a read-only node, into which nothing could be merged.
    OmegaConf.set_readonly(node, None)
    for key in node if OmegaConf.is_dict(node) else ():
        if OmegaConf.is_config(child := node._get_node(key)):
            _make_writable(child)


class Choices(ConfigSource):
    """Configs made from their names.

    Examples: `scale/2x8`, `model/resnet18`, `job/path/to/file.py:function`.
    """

    @staticmethod
    def scheme() -> str:
        return "raydist"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.rstrip("/") in ("", "scale", "model", "optim", "job")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/")
        match group:
            case "schema":
                return not name
            case "scale":
                return SIZE.fullmatch(name) is not None
            case "model":
                return name in torchvision_models()
            case "optim":
                return OPTIMIZER.fullmatch(name) is not None
            case "job":
                return bool(name) and (not targets.is_name(name) or name in targets.job_files())
        return False

    def load_config(self, config_path: str) -> ConfigResult:
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found : {config_path}")
        group, _, name = config_path.partition("/")
        # The header corresponds to the `# @package` line of a file.
        header = {"package": "_global_" if group == "job" else None}
        return ConfigResult(
            provider=self.provider, path=self.full_path(), config=_make(group, name), header=header
        )

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names = {
            "": ["job", "model", "optim", "scale"],
            "model": [*torchvision_models()],
            "job": [*targets.job_files()],
        }
        kind = ObjectType.CONFIG if config_path else ObjectType.GROUP
        return names.get(config_path.rstrip("/"), []) if results_filter in (None, kind) else []


def _make(group: str, name: str) -> Container:
    match group:
        case "schema":
            return schema()
        case "scale":
            return OmegaConf.create(parse_scale(name))
        case "model":
            return OmegaConf.create({"_target_": f"torchvision.models.{name}", "weights": None})
        case "optim":
            return OmegaConf.create({"_target_": name})
    return OmegaConf.create({"job": {"target": name}})


def parse_scale(choice: str) -> dict[str, int]:
    """Return the sizes that a choice of scale names.

    `2x8`: 2 nodes with 8 ranks each. `2..8x4`: 2 to 8 nodes with 4 ranks each. `2..8`: the default
    number of ranks per node.
    """
    match = SIZE.fullmatch(choice)
    assert match is not None, choice
    groups = {
        "nodes": match[1] or match[4],
        "max_nodes": match[2] or match[5],
        "per_node": match[3],
    }
    sizes = {name: int(digits) for name, digits in groups.items() if digits}
    if min(sizes.values()) < 1:
        valid = {name: max(size, 1) for name, size in sizes.items()}
        most = f"..{max(valid['nodes'], valid['max_nodes'])}" if "max_nodes" in valid else ""
        each = f"x{valid['per_node']}" if "per_node" in valid else ""
        raise ConfigError.of(
            "scale", choice, "each number must be 1 or more", f"scale={valid['nodes']}{most}{each}"
        )
    return sizes
