"""Overrides -> Job: Hydra composes conf/ and the overrides, checked before any start. (driver)

A config file is searched in ./conf, then in raydist's own conf/, then made from its name
(choices.py). All uses of `hydra._internal` are in this file.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import get_valid_filename, run_job, setup_globals
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from raydist.settings import env_file, references, script, slurm, targets
from raydist.settings.choices import Choices, schema
from raydist.settings.config import Job, as_saved
from raydist.settings.hydra_errors import config_errors, refuse_sweeps
from raydist.settings.lookup import check_files, missing_path
from raydist.settings.overrides import OPEN, spread, translate_overrides
from raydist.settings.validate import validate
from raydist.shared import env_names, home
from raydist.shared.errors import ConfigError
from raydist.shared.imports import uncollected
from raydist.state.object_store import StoragePath

CONFIG = "config"
"""The primary config: conf/config.yaml."""
LONGEST_NAME = 200
"""Maximum number of bytes in a run's name.

Linux allows 255 in a folder's name; trackers and temporary files append to the name.
"""
_one_at_a_time = threading.Lock()


def compose(
    overrides: Sequence[str] = (),
    target: str | None = None,
    function: Callable[..., Any] | None = None,
    claim: bool = False,
) -> Job:
    """Return the checked Job of these overrides; nothing is started.

    `target`: the file (or file.py:function) that is the job; conf/job/<its stem>.yaml has its
    settings, if it exists. `function`: the job as an object. `claim`: create the run folder, so
    that no other run takes it.
    """
    with _one_at_a_time, hydra_set_up():
        loader = Loader(target, function)
        config = loader.load(overrides)
        job = to_job(config)
        folder = (
            make_folder(config, "hydra.run.dir")
            if claim
            else str(select_value(config, "hydra.run.dir"))
        )
        return dataclasses.replace(job, dir=os.path.abspath(folder))


@contextmanager
def hydra_set_up() -> Iterator[None]:
    """Set Hydra up for raydist while the block runs, then restore its state.

    A notebook may use Hydra itself.
    """
    instance = version.VersionBase.instance()
    base, config = instance.getbase(), HydraConfig.instance().cfg
    version.setbase("1.3")
    setup_globals()
    Plugins.instance().register(Choices)
    resolvers: dict[str, Callable[..., Any]] = {
        "runs": runs,
        "fresh": fresh,
        "secret": references.secret_value,
    }
    for name, resolve in resolvers.items():
        OmegaConf.register_new_resolver(
            f"raydist.{name}", resolve, use_cache=name == "fresh", replace=True
        )
    try:
        yield
    finally:
        instance.version_base = base
        HydraConfig.instance().cfg = config


def runs(environ: Mapping[str, str] = os.environ) -> str:
    """Return the folder of all runs: RAYDIST_RUNS, else ./runs.

    In a submitted Ray job without RAYDIST_RUNS it is ~/raydist/runs.
    """
    # Ray's job supervisor sets this variable for the command that it starts in a copy of the
    # working folder, which it deletes later.
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in environ and not environ.get(env_names.RUNS):
        if (user_home := home.home_folder()) is None:
            cause = (
                f"is not set, and uid {os.getuid()} has no home folder for the runs of a "
                "submitted job"
            )
            raise ConfigError.of(env_names.RUNS, None, cause, f"{env_names.RUNS}=/a/folder")
        return str(user_home / "raydist" / "runs")
    return str(home.runs_folder(environ).absolute())


def fresh(folder: str) -> str:
    """Return the folder, or the first of folder-2, folder-3, … that does not exist."""
    name, number = folder, 1
    while os.path.lexists(name):
        number += 1
        name = f"{folder}-{number}"
    return name


def make_folder(config: DictConfig, key: str) -> str:
    """Create the folder that `key` names. If raydist chose its name, no other run gets it."""
    slurm.check_task(os.environ)
    folder = str(select_value(config, key))
    while True:
        try:
            os.makedirs(folder)
        except FileExistsError:
            # Another run has created it in the meantime. A name that stays the same was typed, so
            # the folder is used as it is.
            OmegaConf.clear_cache(config)
            before, folder = folder, str(select_value(config, key))
            if folder != before:
                continue
            if not os.path.isdir(folder):
                raise ConfigError.of(
                    key, folder, "it is a file", f"{key}={fresh(folder)}"
                ) from None
            if key == "hydra.sweep.dir":
                refuse_second_sweep(folder, key)
        except OSError as error:
            cause = (
                f"the folder cannot be created ({error.strerror}); RAYDIST_RUNS sets the "
                "folder of all runs"
            )
            raise ConfigError.of(key, folder, cause, f"{key}=FOLDER") from error
        require_writable(folder, key)
        return os.path.abspath(folder)


def refuse_second_sweep(folder: str, key: str) -> None:
    """Raise ConfigError for a folder with a sweep: its trials would pass for those of this one.

    One that was refused before its first trial has left none.
    """
    begun = was_begun(Path(folder, "sweep.json"))
    if begun or any(Path(folder).glob("*/trial.json")):
        ways = [f"sweep.resume={folder}"] if begun else []
        cause = "a sweep is in it already"
        raise ConfigError.of(key, folder, cause, *ways, f"{key}={fresh(folder)}") from None


def was_begun(summary: StoragePath) -> bool:
    """Return whether a sweep with this summary has trials, or may still get some."""
    try:
        found = json.loads(summary.read_text(encoding="utf-8"))
        return bool(found["trials"] or found["state"] == "running")
    except FileNotFoundError:
        return False
    except (OSError, ValueError, LookupError, TypeError):
        return True


def require_writable(folder: str, key: str) -> None:
    """Raise ConfigError unless a file can be written to this folder: its disk may be full."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        cause = (
            f"nothing can be written there ({error.strerror}); RAYDIST_RUNS sets the folder of "
            "all runs"
        )
        raise ConfigError.of(key, folder, cause, f"{key}=FOLDER") from error


def select_value(config: DictConfig, key: str) -> Any:
    """Return the resolved value of a key."""
    _resolve_within(config)
    with config_errors(()):
        return OmegaConf.select(config, key, throw_on_missing=True)


def _resolve_within(config: Any) -> None:
    """Let `${hydra:…}` refer to this config. Hydra's own set_config would make it read-only."""
    HydraConfig.instance().cfg = config


def search_path(config_dir: str | None = None) -> ConfigSearchPath:
    """Return where config files are searched, in order; `config_dir` comes first."""
    path = create_config_search_path(None)
    if config_dir and not Path(config_dir).is_dir():
        raise missing_path("--config-dir", config_dir, Path(config_dir), folder=True)
    folders = [*([Path(config_dir)] if config_dir else []), Path("conf"), targets.shipped("conf")]
    sources = dict.fromkeys(
        f"file://{folder.absolute()}" for folder in folders if os.path.isdir(folder)
    )
    for source in [*sources, "raydist://"]:
        path.prepend("raydist", source, SearchPathQuery(provider="schema"))
    return path


class Loader(ConfigLoaderImpl):
    """Hydra's config loader, with raydist's groups, settings and errors.

    `target`, `function`: a job that the caller passed.
    """

    def __init__(
        self,
        target: str | None = None,
        function: Callable[..., Any] | None = None,
        config_dir: str | None = None,
    ) -> None:
        super().__init__(search_path(config_dir))
        self.is_object = function is not None
        self.target = _name_of(function) if function else target
        self.groups = frozenset(self._all_groups())
        self.override_texts: list[str] = []
        """The overrides translated last, as typed, but with references in place of secrets."""

    def _all_groups(self, parent: str = "") -> Iterator[str]:
        for name in self.repository.get_group_options(parent, ObjectType.GROUP):
            group = f"{parent}/{name}" if parent else name
            yield group
            yield from self._all_groups(group)

    def translate(self, overrides: Sequence[str], multirun: bool = False) -> list[str]:
        """Return the overrides for Hydra, with references in place of secrets."""
        for text in overrides:
            if "=" not in text and (group := self._group_of(text)):
                raise ConfigError.of(
                    group, text, "an override is key=value", f"{group}={text}", text=text
                )
            if self.target and text.startswith("job="):
                raise self._job_is_given("job", text.removeprefix("job="))
        translated = translate_overrides(overrides, self.groups, multirun)
        hidden = references.hide_all(translated)
        each = zip(spread(overrides), translated, hidden, strict=True)
        self.override_texts = [text if plain == safe else safe for text, plain, safe in each]
        return hidden

    def _job_is_given(self, key: str, value: str) -> ConfigError:
        return ConfigError.of(
            key, value, f"the job is {self.target} already; leave this setting out"
        )

    def _group_of(self, choice: str) -> str | None:
        if "." in choice and ":" not in choice and not choice.endswith(".py"):
            return None  # this is a setting without a value, not a module without a function
        groups = (
            group
            for group in sorted(self.groups)
            if self.repository.config_exists(f"{group}/{choice}")
        )
        return next(groups, None) if choice and choice[0] not in "~+" else None

    def load(self, overrides: Sequence[str], name: str = CONFIG) -> DictConfig:
        """Return the config of one run."""
        if wrong := next(
            (text for text in overrides if text.lstrip("+").startswith("sweep.")), None
        ):
            key, _, value = wrong.partition("=")
            cause = "a sweep has this setting, one run does not"
            raise ConfigError.of(key, value, cause, f"raydist sweep {wrong}")
        return self.load_configuration(
            name, self.with_target(self.translate(overrides)), RunMode.RUN
        )

    def with_target(self, overrides: list[str]) -> list[str]:
        """Add the job's settings to the overrides if the caller passed a job.

        They are the settings under the job's own name (`job=NAME`), or those of no job (`~job`).
        """
        if not self.target:
            return overrides
        stem = targets.target_stem(self.target)
        files = [source for source in self.get_sources() if source.scheme() == "file"]
        known = any(source.is_config(f"job/{stem}") for source in files)
        return [*overrides, f"job={stem}" if known else "~job"]

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        with config_errors(overrides):
            self._check_primary(config_name)
            if run_mode == RunMode.RUN:
                refuse_sweeps(overrides)
            config = super().load_configuration(
                config_name, overrides, run_mode, from_shell, validate_sweep_overrides
            )
            _resolve_within(config)
            self.complete(config, resolve=run_mode == RunMode.RUN)
        return config

    def _check_primary(self, name: str | None) -> None:
        """Refuse the config.yaml of another program: its folder may also be named conf/."""
        primary = self.repository.load_config(name) if name else None
        if primary is not None and not any(
            each.get_name() == "schema" for each in primary.defaults_list or ()
        ):
            raise ConfigError(
                f"{primary.path.removeprefix('file://')}/{name}.yaml is not raydist's: its "
                "`defaults` must have "
                f"`- schema`; start with a copy of {targets.shipped('conf') / 'config.yaml'}, or "
                "use another folder",
                "--config-name",
                name,
                "- schema",
            )

    def complete(self, config: DictConfig, resolve: bool) -> None:
        """Fill in what follows from other settings.

        These are the variables of env_file=, the webhook, the job's file, and the run's name.
        `resolve`: find the file of the job or script. A sweep itself has none, because each of its
        runs may have another.
        """
        with open_dict(config.env):
            for name, value in env_file.read_env_file(str(config.env_file), os.environ).items():
                if name not in config.env:  # a typed variable takes precedence
                    config.env[name] = references.refer_to(f"env.{name}", value)
        webhook = config.env.get(env_names.NOTIFY_WEBHOOK) or os.environ.get(
            env_names.NOTIFY_WEBHOOK
        )
        if webhook and not config.notify.webhook:
            config.notify.webhook = references.refer_to("notify.webhook", webhook)
        hide_in_config(config)
        target = self.target or str(config.job.target)
        if config.script and self.target:
            raise self._job_is_given("script", config.script)
        if config.script:
            script.refuse_job_settings(config.script, config.hydra.overrides.task)
        if resolve and config.script:
            config.script = script.resolve_script(config.script)
        elif resolve and not self.is_object:
            target = targets.resolve_target(target, config.job.args)
        config.job.target = target = config.script or target
        if config.watch.output == "auto":
            config.watch.output = "all" if config.script else "none"
        stem = (
            target.rpartition(".")[2].rpartition(":")[2]
            if self.is_object
            else targets.target_stem(target)
        )
        stem = script.script_stem(config.script) if config.script else stem
        name = config.name or stem
        config.name = check_name(get_valid_filename(name) or name)


def _name_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return f"{function.__module__}:{getattr(function, '__qualname__', type(function).__name__)}"


def check_name(name: str) -> str:
    """Return the name of a run; ConfigError if it cannot be the name of a folder."""
    if name in (".", "..") or not get_valid_filename(name):
        raise ConfigError.of("name", name, "it cannot be the name of a folder", "name=NAME")
    if len(name.encode()) > LONGEST_NAME:
        cause = f"it is the name of a folder, with at most {LONGEST_NAME} bytes"
        raise ConfigError.of("name", name, cause, f"name={name[:40]}")
    return name


def hide_in_config(config: DictConfig) -> None:
    """Replace the secrets that files of conf/ set by references."""
    for key in (*OPEN, "args", "pip", "backend.mpi.args", "notify"):
        value = OmegaConf.to_container(OmegaConf.select(config, key), resolve=False)
        if (hidden := references.hide(value, key)) != value:
            OmegaConf.update(config, key, hidden, merge=key == "notify")


def to_job(config: DictConfig) -> Job:
    """Return the Job of a composed config, checked, with the files and stores that it names."""
    job = validated_job(config)
    check_files(job)
    return job


def validated_job(config: DictConfig) -> Job:
    """Return the Job of a composed config; ConfigError for values that cannot be right.

    Files are not read.
    """
    with config_errors(()):
        fields = [field.name for field in dataclasses.fields(Job)]
        job = OmegaConf.to_object(OmegaConf.merge(schema(), OmegaConf.masked_copy(config, fields)))
    assert isinstance(job, Job)
    return validate(with_fast(job))


def with_fast(job: Job) -> Job:
    """Return the job with the garbage collection of train.fast.

    The other part of train.fast depends on the rank's device.
    """
    if not job.train.fast or job.train.gc:
        return job
    return dataclasses.replace(job, train=dataclasses.replace(job.train, gc=100))


def save_settings(job: Job, file: Path) -> None:
    """Write all resolved settings of a run as YAML, without the values of secrets."""
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(as_saved(job))), encoding="utf-8")


def hydra_app(loader: Loader, lenient: bool = False) -> Hydra:
    """Return Hydra's own commands: show_cfg, show_info, shell_completion.

    `lenient`: accept incomplete overrides.
    """
    return Hydra("raydist", ConfigLoaderImpl(loader.get_search_path()) if lenient else loader)


def run_once(
    loader: Loader, name: str, overrides: Sequence[str], task: Callable[[Job], None]
) -> None:
    """Compose, create the run folder, and run `task` in it, with Hydra's callbacks."""
    with uncollected():
        config = loader.load(overrides, name)
        job = to_job(config)
    make_folder(config, "hydra.run.dir")
    callbacks = Callbacks(config)
    callbacks.on_run_start(config=config, config_name=name)
    context = HydraContext(loader, callbacks)
    done = run_job(lambda _: task(_saved(job)), config, "hydra.run.dir", None, context)
    callbacks.on_run_end(config=config, config_name=name, job_return=done)


class SweepConfig:
    """The settings of a sweep: what its trials have in common, and what differs."""

    def __init__(
        self,
        overrides: Sequence[str],
        name: str = CONFIG,
        config_dir: str | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Compose the settings that the trials have in common.

        `name`, `config_dir`: --config-name and --config-dir. `function`: as for compose().
        """
        with _one_at_a_time, hydra_set_up():
            self._loader = loader = Loader(None, function, config_dir)
            translated = loader.with_target(
                [*loader.translate(overrides, multirun=True), "hydra.mode=MULTIRUN"]
            )
            self._config = config = loader.load_configuration(name, translated, RunMode.MULTIRUN)
            hydra = config.hydra
            if not hydra.sweeper._target_.endswith(".BasicSweeper"):
                cause = "raydist runs sweeps itself"
                raise ConfigError.of(
                    "hydra/sweeper",
                    hydra.runtime.choices["hydra/sweeper"],
                    cause,
                    "sweep.sampler=tpe",
                )
            task = [
                str(text)
                for text in OmegaConf.to_container(hydra.overrides.task, resolve=False) or ()
            ]
            params = [f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()]
            with config_errors([*params, *task]):
                parsed = OverridesParser.create(loader).parse_overrides([*params, *task])
        self.overrides: dict[str, Override] = {_unique(each, parsed): each for each in parsed}
        """Hydra's overrides by key without a sign; the last one of each key.

        Of several for one dictionary, which all apply, the others are there by all their text.
        """
        self.override_texts = loader.override_texts
        """All overrides as typed, but with references in place of secrets."""
        self.config_dir = config_dir
        self.function = _name_of(function) if function else ""
        """The job's name, MODULE:NAME, if it is an object that the caller passed."""
        self._jobs: dict[tuple[str, ...], Job] = {}

    def job(self, overrides: Sequence[str]) -> Job:
        """Return the checked Job of a trial.

        `overrides`: all of them, in Hydra's grammar, each with one value.
        """
        if (known := self._jobs.get(tuple(overrides))) is None:
            with _one_at_a_time, hydra_set_up():
                _resolve_within(self._config)
                known = to_job(self._loader.load_sweep_config(self._config, list(overrides)))
            self._jobs[tuple(overrides)] = known
        return known

    def make_folder(self) -> str:
        """Create the folder of the sweep, with its settings in Hydra's form."""
        with _one_at_a_time, hydra_set_up():
            folder = make_folder(self._config, "hydra.sweep.dir")
            OmegaConf.save(self._config, Path(folder, "multirun.yaml"))
        return folder


def _unique(override: Override, every: Sequence[Override]) -> str:
    """Return the key of an override without a sign, or its text if a later one adds to it.

    `scale.labels={ray.io/zone:a}` has one label, and others of the same key have more.
    """
    key = override.get_key_element().lstrip("+")
    same = [each for each in every if each.get_key_element().lstrip("+") == key]
    adds = key in OPEN and not override.is_sweep_override() and override is not same[-1]
    return str(override.input_line) if adds else key


def _saved(job: Job) -> Job:
    """Return the job in the folder that Hydra created for it; save its resolved settings there."""
    hydra = HydraConfig.get()
    job = dataclasses.replace(job, dir=hydra.runtime.output_dir)
    if hydra.output_subdir is not None:
        save_settings(job, Path(job.dir, hydra.output_subdir, "config.yaml"))
    return job
