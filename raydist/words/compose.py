"""Words -> Job: conf/ and the words typed, composed by Hydra, checked before anything starts. (driver)

A config file is looked for in ./conf, then in raydist's own conf/, then made up from its name (choices.py).
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.core.utils import get_valid_filename, setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from raydist import fabric_horovod, shipping, storage
from raydist.check import check
from raydist.config import SECRET, Job, as_saved
from raydist.errors import ConfigError, RaydistError, nearest
from raydist.words import env_file, lookup, script
from raydist.words.choices import Choices, schema
from raydist.words.refusals import in_plain_words
from raydist.words.translate import translate

CONFIG = "config"
"""The primary config: conf/config.yaml."""
_secrets: dict[str, str] = {}
_one_at_a_time = threading.Lock()


def compose(
    words: Sequence[str] = (),
    target: str | None = None,
    function: Callable[..., Any] | None = None,
    claim: bool = False,
) -> Job:
    """The Job that the words say, checked; nothing is started.

    `target`: the file (or file.py:function) that is the job, whatever conf/ says; conf/job/<its stem>.yaml counts.
    `function`: the job itself, where it is an object. `claim`: make the run folder, so that no other run can take it.
    """
    if (target or function) and (chosen := next((word for word in words if word.startswith("job=")), None)):
        fixed = target or (function and _described(function))
        raise ConfigError(f"{chosen}: the job is {fixed} already; leave the word out")
    with _one_at_a_time, hydra_set_up():
        loader = Loader(target, function)
        config = loader.load([*words, *loader.job_word()])
        folder = make_folder(config, "hydra.run.dir") if claim else str(select(config, "hydra.run.dir"))
        return dataclasses.replace(to_job(config), dir=os.path.abspath(folder))


def _described(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


@contextmanager
def hydra_set_up() -> Iterator[None]:
    """Hydra as raydist wants it, inside only: a notebook may have its own use of it."""
    instance = version.VersionBase.instance()
    base, config = instance.getbase(), HydraConfig.instance().cfg
    version.setbase("1.3")
    setup_globals()
    Plugins.instance().register(Choices)
    resolvers: dict[str, Callable[..., Any]] = {"runs": runs, "fresh": fresh, "secret": _secrets.__getitem__}
    for name, resolve in resolvers.items():
        OmegaConf.register_new_resolver(f"raydist.{name}", resolve, use_cache=name == "fresh", replace=True)
    try:
        yield
    finally:
        instance.version_base = base
        HydraConfig.instance().cfg = config


def runs(environ: Mapping[str, str] = os.environ) -> str:
    """The folder of all runs: below the one that one stands in, unless that ends with the submitted Ray job."""
    if named := environ.get("RAYDIST_RUNS"):
        return str(Path(named).expanduser().absolute())
    # what Ray's job supervisor gives to the command it starts, in a copy of the working folder that it deletes later
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ:
        return str(Path("~/raydist/runs").expanduser())
    return str(Path("runs").absolute())


def fresh(folder: str) -> str:
    """The folder, or the first of folder-2, folder-3, … that is not there yet."""
    tried, number = folder, 1
    while os.path.lexists(tried):
        number += 1
        tried = f"{folder}-{number}"
    return tried


def make_folder(config: DictConfig, key: str) -> str:
    """Make the folder that `key` names, for this run alone where its name is raydist's to choose."""
    folder = str(select(config, key))
    while True:
        try:
            os.makedirs(folder)
        except FileExistsError:
            # another run took it since; a name that stays was typed by the person, who means it
            OmegaConf.clear_cache(config)
            before, folder = folder, str(select(config, key))
            if folder != before:
                continue
            if not os.path.isdir(folder):
                raise ConfigError(f"{key}={folder}: that is a file; say {key}={fresh(folder)}") from None
        except OSError as error:
            raise ConfigError(
                f"{key}={folder}: no folder can be made there ({error.strerror}); "
                f"say {key}=FOLDER, or set RAYDIST_RUNS to where runs may go"
            ) from error
        return os.path.abspath(folder)


def _resolve_within(config: Any) -> None:
    """Make `${hydra:…}` mean this config; Hydra's own set_config would make it read-only."""
    HydraConfig.instance().cfg = config


def select(config: DictConfig, key: str) -> Any:
    """The value of a key, resolved."""
    _resolve_within(config)
    with in_plain_words(()):
        return OmegaConf.select(config, key, throw_on_missing=True)


def search_path(config_dir: str | None = None) -> ConfigSearchPath:
    """Where configs are looked for, in this order; `config_dir` comes first."""
    found = create_config_search_path(None)
    here, shipped = Path("conf").absolute(), lookup.shipped("conf")
    if config_dir and not Path(config_dir).is_dir():
        close = nearest(config_dir, [each.name for each in Path().iterdir() if each.is_dir()])
        raise ConfigError(
            f"--config-dir {config_dir}: there is no such folder" + (f"; did you mean {close}?" if close else "")
        )
    folders = [config_dir and Path(config_dir).absolute(), here if here.is_dir() else None, shipped]
    for folder in dict.fromkeys(folder for folder in folders if folder):
        found.prepend("raydist", f"file://{folder}", SearchPathQuery(provider="schema"))
    found.prepend("raydist", "raydist://", SearchPathQuery(provider="schema"))
    return found


class Loader(ConfigLoaderImpl):
    """Hydra's composer; refuses in plain words, and gives back settings that are settled and checked."""

    def __init__(
        self, target: str | None = None, function: Callable[..., Any] | None = None, config_dir: str | None = None
    ) -> None:
        super().__init__(search_path(config_dir))
        self.by_object = function is not None
        self.fixed = _described(function) if function else target
        self.groups = frozenset(self._all_groups())

    def _all_groups(self, parent: str = "") -> Iterator[str]:
        for name in self.repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            yield group
            yield from self._all_groups(group)

    def translate(self, words: Sequence[str], multirun: bool = False) -> list[str]:
        """The words for Hydra; the secrets among them stay here."""
        for word in words:
            if "=" not in word and (group := self._group_of(word)):
                raise ConfigError(f"{word}: say {group}={word}")
        translated, secrets = translate(words, self.groups, multirun)
        _secrets.update(secrets)
        return translated

    def _group_of(self, choice: str) -> str | None:
        if "." in choice and ":" not in choice and not choice.endswith(".py"):
            return None  # a setting without its value, rather than a module without its function
        found = (group for group in sorted(self.groups) if self.repository.config_exists(f"{group}/{choice}"))
        return next(found, None) if choice and choice[0] not in "~+" else None

    def job_word(self) -> list[str]:
        """The word that chooses the settings of a job that is fixed: those of its file's name, or none."""
        if self.fixed is None:
            return []
        stem = lookup.stem(self.fixed)
        files = [source for source in self.get_sources() if source.scheme() == "file"]
        return [f"job={stem}" if any(source.is_config(f"job/{stem}") for source in files) else "~job"]

    def load(self, words: Sequence[str], name: str = CONFIG) -> DictConfig:
        """The settings that the words say."""
        return self.load_configuration(name, self.translate(words), RunMode.RUN)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        with in_plain_words(overrides):
            self._check_primary(config_name)
            config = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
            self.settle(config, checked=run_mode == RunMode.RUN)
        return config

    def _check_primary(self, name: str | None) -> None:
        """Refuse the config.yaml of some other program, which a folder named conf/ may well hold."""
        found = self.repository.load_config(name) if name else None
        if found is not None and not any(each.get_name() == "schema" for each in found.defaults_list or ()):
            raise ConfigError(
                f"{found.path.removeprefix('file://')}/{name}.yaml is not raydist's: its `defaults` must have "
                f"`- schema`; begin with a copy of {lookup.shipped('conf') / 'config.yaml'}, or stand in another folder"
            )

    def settle(self, config: DictConfig, checked: bool = True) -> None:
        """Fill in what follows from the words: the job's place and name; keep secrets out of what may be saved.

        `checked`: refuse a job that can't be right. The frame of a sweep isn't: its words are not all there yet.
        """
        _resolve_within(config)
        with open_dict(config.env):
            for name, value in env_file.read(str(config.env_file), os.environ).items():
                if name not in config.env:  # what was typed wins
                    config.env[name] = hidden(name, value)
        hide_secrets(config)
        target = self.fixed or str(config.job.target)
        if checked:
            job = to_job(config)
            check_resume(job)
            storage.check("storage", job.storage)
            shipping.check(job)
            if config.script and self.fixed:
                raise ConfigError(f"script={config.script}: the job is {self.fixed} already; leave the word out")
            if config.script:
                config.script = target = script.settle(job)
            elif not self.by_object:
                target = lookup.settle(target, job.job.args)
        config.job.target = target
        if config.watch.output == "auto":
            config.watch.output = "all" if config.script else "none"
        named_after = target.rpartition(".")[2].rpartition(":")[2] if self.by_object else lookup.stem(target)
        named_after = script.stem(config.script) if config.script else named_after
        config.name = get_valid_filename(config.name or named_after)


def hide_secrets(config: DictConfig) -> None:
    """Put secrets behind a resolver: whatever Hydra saves or shows then holds their names only."""
    for key, value in config.env.items_ex(resolve=False):
        if SECRET.search(key) and not str(value).startswith("${"):
            config.env[key] = hidden(key, str(value))


def hidden(key: str, value: str) -> str:
    """A value behind a resolver: nobody takes it for one of OmegaConf's own, and Hydra saves only its name."""
    _secrets[key] = value
    return f"${{raydist.secret:{key}}}"


def to_job(config: DictConfig) -> Job:
    """The settings as frozen dataclasses, checked."""
    with in_plain_words(()):
        fields = [field.name for field in dataclasses.fields(Job)]
        job = OmegaConf.to_object(OmegaConf.merge(schema(), OmegaConf.masked_copy(config, fields)))
    assert isinstance(job, Job)
    if job.backend.name == "horovod":
        fabric_horovod.check_settings(job)
    return check(job)


def check_resume(job: Job) -> None:
    """Refuse a checkpoint to go on from that is not there, or not complete."""
    if job.resume not in ("none", "auto"):
        from raydist import checkpoint

        storage.check("resume", job.resume)
        with storage.environment(job.env):
            try:
                checkpoint.find(job.resume, Path())
            except RaydistError:
                raise
            except Exception as error:
                raise ConfigError(f"resume={job.resume}: that can't be read ({storage.reason(error)})") from error


def typed(config: DictConfig) -> list[str]:
    """The words that a config was composed of; unresolved, for there may be a secret behind one."""
    words = OmegaConf.to_container(config.hydra.overrides.task, resolve=False)
    assert isinstance(words, list)
    return [str(word) for word in words]


def save(job: Job, file: Path) -> None:
    """Write all settings of a run as YAML, resolved; of secrets only the names."""
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(as_saved(job))), encoding="utf-8")
