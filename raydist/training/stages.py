"""Cuts a model into the stages of a pipeline, at block boundaries. (rank side)"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from raydist.shared.errors import ConfigError
from raydist.training import hf_stages
from raydist.training.blocks import of_transformers
from raydist.training.evaluation import in_mode


class _Outside(fx.Tracer):
    """Traces what a model does around its blocks: it enters only modules that contain blocks."""

    def __init__(self, entered: Sequence[nn.Module]) -> None:
        super().__init__()
        self._entered = entered

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._entered


def cut_model(model: nn.Module, blocks: Sequence[nn.Module], stages: int) -> list[nn.Module]:
    """Cut a model into stages; each takes the outputs of the previous one.

    All stages have the model's own modules, under their names in the model. Blocks are divided
    evenly. The first stage has what comes before the blocks, the last what comes after them; what
    is between two blocks stays with the first of them. ConfigError: torch.fx cannot follow the
    model's `forward`, or a model of transformers is not made for stages, or there are fewer blocks
    than stages.
    """
    if of_transformers(model):
        return hf_stages.cut_by_plan(model, blocks, _begins(model, blocks, stages))
    graph = _follow(model, blocks, stages)
    calls = [
        each
        for each in graph.nodes
        if each.op == "call_module" and model.get_submodule(each.target) in blocks
    ]
    names = [each.name for each in calls]
    begins = {names[at] for at in _begins(model, blocks, stages, len(calls))[1:]}
    stage_of = {}
    stage = 0
    for node in graph.nodes:
        stage += node.name in begins
        stage_of[node] = stages - 1 if node.op == "output" else stage
    parts: list[nn.Module] = [
        fx.GraphModule(model, _stage(graph.nodes, stage_of, number, stages))
        for number in range(stages)
    ]
    _save_no_more_than(model, parts)
    return parts


def _begins(
    model: nn.Module, blocks: Sequence[nn.Module], stages: int, calls: int | None = None
) -> list[int]:
    """Return the number of the first call of a block in each stage.

    `calls`: of blocks in all; None: each is called once. ConfigError: there are too few.
    """
    count = len(blocks) if calls is None else calls
    if count < stages:
        cause = (
            f"{type(model).__name__} has {count} blocks ({type(blocks[0]).__name__}), "
            f"too few for {stages} stages"
        )
        raise ConfigError.of(
            "parallel.pp", stages, cause, f"parallel.pp={count}", "parallel.blocks=CLASS"
        )
    return [count * stage // stages for stage in range(stages)]


def _save_no_more_than(model: nn.Module, parts: Sequence[nn.Module]) -> None:
    """Keep the buffers that the model does not save out of its stages' states.

    In torch 2.8 a GraphModule saves every buffer.
    """
    saved = model.state_dict().keys()
    for part in parts:
        for name, value in [*part.named_buffers(remove_duplicate=False)]:
            if name not in saved:
                owner, _, own_name = name.rpartition(".")
                part.get_submodule(owner).register_buffer(own_name, value, persistent=False)


def _follow(model: nn.Module, blocks: Sequence[nn.Module], stages: int) -> fx.Graph:
    """Return the model's forward as a graph whose nodes are blocks and what is around them."""
    entered = [
        each
        for each in model.modules()
        if each not in blocks and any(inner in blocks for inner in each.modules())
    ]
    parameters = inspect.signature(model.forward).parameters.values()
    optional = {each.name: each.default for each in parameters if each.default is not each.empty}
    graphs = []
    try:
        for mode in (False, True):
            with in_mode(model, mode):
                graphs.append(_Outside(entered).trace(model, optional or None))
    except Exception as error:  # any error of a forward that gets a value not computed yet
        cause = f"torch.fx cannot follow {type(model).__name__}.forward around its blocks: {error}"
        raise ConfigError.of("parallel.pp", stages, cause, "parallel=fsdp parallel.pp=1") from error
    if str(graphs[0]) != str(graphs[1]):
        cause = (
            f"{type(model).__name__}.forward differs in training and evaluation: use modules "
            "for that, as nn.Dropout"
        )
        raise ConfigError.of("parallel.pp", stages, cause, "parallel=fsdp parallel.pp=1")
    return graphs[1]


def _stage(
    nodes: Iterable[fx.Node], stage_of: dict[fx.Node, int], stage: int, stages: int
) -> fx.Graph:
    graph, made = fx.Graph(), {}
    for node in _crossing(stage_of, stage - 1):
        made[node] = graph.placeholder(node.name)

    def here(node: fx.Node) -> fx.Node:
        if node not in made:  # a parameter or a buffer, which each stage takes from the model
            made[node] = graph.node_copy(node)
        return made[node]

    for node in nodes:
        if (
            stage_of[node] == stage
            and node.op not in ("get_attr", "output")
            and (node.users or node.op != "placeholder")
        ):
            made[node] = graph.node_copy(node, here)
    if stage == stages - 1:
        graph.output(map_arg(next(each for each in nodes if each.op == "output").args[0], here))
    else:
        given = tuple(made[node] for node in _crossing(stage_of, stage))
        graph.output(given if len(given) > 1 else given[0])
    return graph


def _crossing(stage_of: dict[fx.Node, int], stage: int) -> list[fx.Node]:
    """Return the values that this stage passes to the next one, in order."""
    return [
        node
        for node, at in stage_of.items()
        if at <= stage
        and node.op != "get_attr"
        and any(stage_of[user] > stage for user in node.users)
    ]


def shared(model: nn.Module, parts: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Return the tied parameters by their first name in the model: the stages that have them."""
    held = [{id(value) for value in part.parameters()} for part in parts]
    by_name = {
        name: tuple(stage for stage, ids in enumerate(held) if id(value) in ids)
        for name, value in model.named_parameters()
    }
    return {name: stages for name, stages in by_name.items() if len(stages) > 1}


def keep_tied(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Give the model a stage's parameter under this name, which another stage has for itself."""
    owner, _, own = name.rpartition(".")
    setattr(model.get_submodule(owner), own, parameter)


def forget_others(model: nn.Module, part: nn.Module) -> None:
    """Free the parameters and buffers that are not in this part: they are on meta from now on."""
    own = [*part.modules()]
    for module in model.modules():
        if module not in own:
            module.to_empty(device=torch.device("meta"), recurse=False)
