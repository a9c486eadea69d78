"""Cuts a model of transformers into the stages of a pipeline. (rank side)

torch.fx cannot follow the wrappers around its `forward`. But such a model takes hidden states in
place of tokens (`inputs_embeds`), calls its blocks one after another, and names what comes before
and after them (`_pp_plan`). So a stage is the model itself, with others in the places of modules
that are in other stages: in that of an earlier block one that returns what the previous stage has
sent, in that of a later block one that ends the call.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from raydist.shared.errors import ConfigError
from raydist.training.blocks import named_layer
from raydist.training.evaluation import in_mode

OUTPUTS = ("loss", "logits", "last_hidden_state")
"""What of its output a model in stages returns on all ranks."""
INSTEAD = "parallel=fsdp parallel.pp=1"


class StageEnd(Exception):
    """Ends the call of a model: the next block is one of a later stage."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class StandIn(nn.Module):
    """Is in the place of a module of another stage."""

    def __init__(self, module: nn.Module, answer: Callable[[Any], Any]) -> None:
        """`answer`: gets the first argument of a call."""
        super().__init__()
        # A model may ask its blocks for a number or a word, such as their kind of attention.
        facts = {
            key: own for key, own in vars(module).items() if isinstance(own, str | int | float)
        }
        vars(self).update({key: own for key, own in facts.items() if not key.startswith("_")})
        self.answer = answer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.answer(inputs[0] if inputs else next(iter(named.values())))


class StageCall:
    """The `forward` of a stage.

    (tokens, or what the previous stage sent; the rest of the batch by name) -> hidden states, or on
    the last stage the tensors of the model's output.
    """

    def __init__(self, model: nn.Module, first: bool) -> None:
        self.kind = type(model)
        self.first = first
        self.sent: torch.Tensor | None = None
        """What the previous stage has sent, during a call."""
        self.others: dict[str, Any] = {}
        """What of a batch is no tensor, by name."""
        self.batch: dict[str, Any] = {}
        """The batch of the last call, without its tokens."""
        self.made: tuple[Any, dict[str, torch.Size]] = dict, {}
        """Of the output of the last call: its class, and the shapes of its tensors."""

    def forward(self, part: nn.Module, given: torch.Tensor, **named: torch.Tensor) -> Any:
        """Call the stage `part`."""
        self.batch = {**named, **self.others}
        self.sent = None if self.first else given
        tokens = {main_input(part) if self.first else "inputs_embeds": given}
        try:
            output = call_model(self.kind, part, **tokens, **self.batch)
        except StageEnd as end:
            return end.hidden
        finally:
            self.sent = None
        tensors = {name: each for name, each in output.items() if isinstance(each, torch.Tensor)}
        self.made = type(output), {name: each.shape for name, each in tensors.items()}
        # Outputs of micro-batches are joined, which those of shape [] cannot be.
        return tuple(each if each.dim() else torch.stack([each]) for each in tensors.values())

    def take_sent(self, _: Any) -> Any:
        """Return what the last earlier block returned."""
        return self.sent

    def output_of(self, tensors: Any) -> Any:
        """Return the output of the last call.

        `tensors`: what `forward` returned; torch gives one alone as it is.
        """
        kind, shapes = self.made
        tensors = (tensors,) if isinstance(tensors, torch.Tensor) else tensors
        pairs = zip(shapes.items(), tensors, strict=True)
        return kind(**{name: each.view(shape) for (name, shape), each in pairs})

    def loss_of(self, loss: Any, whole: bool) -> Any:
        """Return a loss (tensors, target) of a loss (output, target).

        `whole`: it gets the whole batch for the target.
        """
        return lambda tensors, target: loss(
            self.output_of(tensors), self.batch if whole else target
        )

    def bind(
        self, inputs: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the tokens of a batch, and its other tensors by name.

        ConfigError: there are none, or a tensor has not one row for each sample.
        """
        places = [*inspect.signature(self.kind.forward).parameters][1:]
        batch = {**dict(zip(places, inputs, strict=False)), **named}
        main = main_input(self.kind)
        if main not in batch:
            _refuse(f"the first stage takes {main}, and a batch has {', '.join(batch)}")
        tokens: torch.Tensor = batch.pop(main)
        tensors = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor)}
        self.others = {name: each for name, each in batch.items() if name not in tensors}
        for name, each in tensors.items():
            if not each.dim() or len(each) not in (1, len(tokens)):
                _refuse(
                    f"a batch is split by its {len(tokens)} samples, and {name} has the shape "
                    f"{[*each.shape]}"
                )
            tensors[name] = each.expand(len(tokens), *each.shape[1:])
        return tokens, tensors


def main_input(model: Any) -> str:
    """Return the name of the argument that has the tokens. `model`: or its class."""
    return getattr(model, "main_input_name", None) or "input_ids"


def call_model(kind: Any, part: nn.Module, **batch: Any) -> Any:
    """Call a model, or a stage of it, as one of this class; return its output, which has names."""
    batch["return_dict"] = True
    if "use_cache" in inspect.signature(kind.forward).parameters:
        batch["use_cache"] = False  # it is for generation
    return kind.forward(part, **batch)


def output_with(tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return an output as models of transformers have it."""
    from transformers.utils import ModelOutput

    return ModelOutput(**tensors)


def cut_by_plan(
    model: nn.Module, blocks: Sequence[nn.Module], begins: Sequence[int]
) -> list[nn.Module]:
    """Cut a model of transformers into stages; each takes the hidden states of the previous one.

    All stages have the model's own modules, under their names in the model. `begins`: the number of
    the first block of each stage. A stage takes the rest of the batch as keywords. ConfigError: the
    model is not made for it.
    """
    ends = find_outside(model, blocks)
    check_calls(model, blocks, ends)
    last = len(begins) - 1
    parts = []
    for stage, begin in enumerate(begins):
        end = begins[stage + 1] if stage < last else len(blocks)
        call = StageCall(model, stage == 0)
        others: dict[nn.Module, nn.Module] = {
            block: StandIn(block, call.take_sent if number < begin else _reach)
            for number, block in enumerate(blocks)
            if not begin <= number < end
        }
        for module, (name, of_first) in ends.items():
            if stage != (0 if of_first else last):
                others[module] = StandIn(module, partial(_absent, name))
        part = with_others(model, others)
        part.forward = partial(call.forward, part)
        parts.append(part)
    return parts


def call_of(part: nn.Module) -> StageCall | None:
    """Return the StageCall of a stage. None: torch.fx has made it."""
    forward = part.forward
    call = getattr(forward.func, "__self__", None) if isinstance(forward, partial) else None
    return call if isinstance(call, StageCall) else None


class Outside(NamedTuple):
    """A module with parameters that is outside of the blocks."""

    name: str
    of_first: bool
    """It is in the first stage, else in the last one."""


def find_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[nn.Module, Outside]:
    """Return the modules with parameters outside of the blocks.

    ConfigError: the model does not say in which stage one of them is, or what its blocks are.
    """
    plan = {
        f"{name}.{own}".lstrip("."): takes
        for name, module in model.named_modules()
        for own, (takes, _) in (getattr(module, "_pp_plan", None) or {}).items()
    }
    config: Any = getattr(model, "config", None)
    kind = type(model).__name__
    if not plan or getattr(config, "is_encoder_decoder", False):
        _refuse(f"{kind} has no plan of stages (_pp_plan)")
    if "inputs_embeds" not in inspect.signature(type(model).forward).parameters:
        _refuse(f"{kind}.forward takes no inputs_embeds")
    if getattr(config, "output_router_logits", False):
        _refuse(f"the loss of {kind} needs all blocks: build it with output_router_logits=False")
    names = {module: name for name, module in model.named_modules()}
    if odd := {names[each].rpartition(".")[0] for each in blocks} - plan.keys():
        _refuse(f"its blocks are in {min(odd)}, of which {kind} does not plan stages (_pp_plan)")

    def walk(module: nn.Module, name: str) -> Iterator[tuple[nn.Module, Outside]]:
        if module in blocks or next(module.parameters(), None) is None:
            return
        if name in plan and not any(each in blocks for each in module.modules()):
            yield module, Outside(name, main_input(model) in plan[name])
        elif next(module.parameters(recurse=False), None) is not None:
            _refuse(f"{kind} does not say in which stage {name or 'its own weight'} is (_pp_plan)")
        else:
            for own, child in module.named_children():
                yield from walk(child, f"{name}.{own}".lstrip("."))

    return dict(walk(model, ""))


def check_calls(
    model: nn.Module, blocks: Sequence[nn.Module], ends: Mapping[nn.Module, Outside]
) -> None:
    """Call the model without its blocks, before any training.

    ConfigError: it does not give each block what the one before it has returned, as stages do.
    """
    embedding: Any = named_layer(model, "get_input_embeddings")
    weight = embedding.weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    hidden = torch.zeros(1, 2, weight.shape[1], dtype=weight.dtype, device=device)
    called: list[int] = []

    def answer(number: int, given: Any) -> Any:
        if number != len(called) or (called and given is not hidden):
            raise ConfigError("it changes what goes from one to the next")
        called.append(number)
        if number == len(blocks) - 1:
            raise StageEnd(given)
        return hidden

    others: dict[nn.Module, nn.Module] = {
        block: StandIn(block, partial(answer, number)) for number, block in enumerate(blocks)
    }
    others |= {each: StandIn(each, partial(_absent, name)) for each, (name, _) in ends.items()}
    inside = {inner for block in blocks for inner in block.modules()}
    for each in {*model.modules()} - inside:  # such as positions, which have no values yet
        if not [*each.children()] and any(value.is_meta for value in each.buffers()):
            others[each] = StandIn(each, lambda _: (hidden, hidden))
    probe, why = with_others(model, others), "it does not call all of them"
    try:
        with in_mode(probe, False), torch.no_grad():
            call_model(type(model), probe, inputs_embeds=hidden.clone())
    except StageEnd:
        return
    except Exception as error:  # any error of a forward that goes another way
        why = error.message if isinstance(error, ConfigError) else str(error)
    _refuse(f"{type(model).__name__} cannot call its blocks in stages: {why}")


def with_others(module: nn.Module, others: Mapping[nn.Module, nn.Module]) -> nn.Module:
    """Return a module with others in the places of some modules; what is not changed is shared."""
    if module in others:
        return others[module]
    children = {name: with_others(child, others) for name, child in module.named_children()}
    if all(own is children[name] for name, own in module.named_children()):
        return module
    made = copy.copy(module)
    for name, own in vars(module).items():
        # Its own parameters, buffers, children and hooks, which may change.
        if name.startswith("_") and isinstance(own, dict | set):
            vars(made)[name] = copy.copy(own)
    vars(made)["_modules"].update(children)
    return made


def _reach(hidden: Any) -> NoReturn:
    raise StageEnd(hidden)


def _absent(name: str, _: Any) -> NoReturn:
    raise ConfigError(f"it needs {name} in another stage than it says (_pp_plan)")


def _refuse(cause: str) -> NoReturn:
    raise ConfigError.of("parallel.pp", None, cause, INSTEAD)
