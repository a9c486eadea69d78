"""The blocks of a model: the modules that are sharded and compiled one by one. (rank side)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from raydist.shared.errors import ConfigError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_blocks(
    model: nn.Module, named: str = "", without: str = "parallel=ddp"
) -> list[nn.Module]:
    """Return the blocks, in the order of the model; none is inside another one.

    Blocks are found by class: `named` (parallel.blocks), otherwise what the model itself names
    (`_no_split_modules`, as Hugging Face's models do), otherwise the class that repeats in a
    ModuleList or Sequential. ConfigError: there is none. Sharding only the whole model would gather
    all of it at once, and save next to nothing. `without`: the setting that needs no blocks.
    """
    names = {named} if named else {*(getattr(model, "_no_split_modules", None) or ())}
    found = list(_outermost(model, names) if names else _repeated(model))
    if found:
        return found
    classes = sorted(
        {type(each).__name__ for each in model.modules() if each is not model and _has_own(each)}
    )
    if named:
        raise ConfigError.unknown(
            "parallel.blocks", named, classes, f"{type(model).__name__} has no such module"
        )
    cause = (
        f"no class repeats in a ModuleList or Sequential of {type(model).__name__}, so its "
        "blocks are unknown"
    )
    raise ConfigError.of(
        "parallel.blocks", None, cause, "parallel.blocks=CLASS", without, known=classes
    )


def find_ends(
    model: nn.Module, blocks: Sequence[nn.Module], chunks: int = 1
) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the embedding and the head of a model, which are gathered for their own call only.

    They are what its methods `get_input_embeddings` and `get_output_embeddings` return, which
    Hugging Face's models have: other code of the model may use a weight outside of the module's
    call, and would find a shard there. None: it names none, the module is in a block, or it shares
    a parameter with another module, which needs it at another time. `chunks`: with several
    (`train.loss_chunks`) the head is called after the model.
    """
    inside = {inner for block in blocks for inner in block.modules()}
    holders = Counter(id(value) for each in model.modules() for value in _own(each))
    embedding = named_layer(model, "get_input_embeddings")
    head = named_layer(model, "get_output_embeddings")
    if embedding is head:
        return None, None

    def alone(module: nn.Module | None) -> bool:
        if module is None or module in inside or not _has_own(module):
            return False
        return all(holders[id(value)] == 1 for value in module.parameters())

    return embedding if alone(embedding) else None, head if alone(head) and chunks == 1 else None


def named_layer(model: nn.Module, method: str) -> nn.Module | None:
    """Return the layer that this method of a model returns; None: it has no such method."""
    try:
        layer: nn.Module | None = getattr(model, method, lambda: None)()
    except NotImplementedError:  # that of a model without text, in transformers
        return None
    return layer


def of_transformers(model: nn.Module) -> bool:
    """Report whether a model is one of transformers, as it is or of a class made from it."""
    return any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Have the models of transformers in a model keep no cache of keys and values meanwhile.

    It only serves the generation of text. A decoder may have a configuration for itself.
    """
    cached: list[Any] = []
    for each in model.modules():
        config: Any = getattr(each, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            cached.append(config)
    try:
        yield
    finally:
        for config in cached:
            config.use_cache = True


def _own(module: nn.Module) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False)


def _outermost(module: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    """Yield the modules of these classes, without those inside of others."""
    for child in module.children():
        if type(child).__name__ in names:
            yield child
        else:
            yield from _outermost(child, names)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the class that repeats in a container.

    If several repeat, it is the one with the most parameters.
    """
    kinds = (
        Counter(type(each) for each in module.children() if _has_own(each))
        if _is_container(module)
        else Counter()
    )
    repeated = [
        kind for kind, count in kinds.items() if count > 1 and not issubclass(kind, CONTAINERS)
    ]
    block = max(repeated, key=lambda kind: _size(module, kind), default=None)
    for child in module.children():
        if block is not None and type(child) is block:
            yield child
        else:
            yield from _repeated(child)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, CONTAINERS)


def _has_own(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: nn.Module, kind: type) -> int:
    """Return the number of parameters of all children of this class."""
    return sum(
        value.numel()
        for each in module.children()
        if type(each) is kind
        for value in each.parameters()
    )
