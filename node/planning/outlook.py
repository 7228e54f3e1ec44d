"""Ways to train a run's model on some machines, side by side, and which one to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from node.config.run_config import RunConfig, load_run
from node.config.toml import ConfigError
from node.planning.costs import Outlook, Pipeline, Workload, pipeline, whole_model
from node.planning.machines import PlannedSwarm
from node.tasks.gpt_stage import measure
from node.tasks.partition import BlockCost
from protocols.registry import REPLICATED_PROTOCOLS, activation_bytes
from protocols.vectors.codec import codec

STAGES = (2, 4, 8)
CLOSE = 0.05
"""Ways whose tokens/s differ by less are equal; the first of them is the simplest."""


@dataclass(frozen=True, slots=True)
class MeasuredModel:
    """A model and how it is trained: whole, and for each number of stages cut up, or why it cannot be.

    `stages` is that of the run file.
    """

    stages: int
    whole: Workload
    staged: Mapping[int, Pipeline | str]


def measured_model(run: Path | None, timer: Callable[[], float]) -> MeasuredModel:
    """Measure the model of a run file on this machine. Raises ConfigError.

    Blocks for seconds to minutes, by the model's size.
    """
    config = load_run(run, {}, REPLICATED_PROTOCOLS)
    if config.gpt is None:
        raise ConfigError(f"task {config.task} cannot be cut into stages: a plan is for the task gpt")
    blocks = measure(config.preset(), timer)
    whole = _workload(_whole(config), blocks)
    rows = config.gpt.rows
    staged: dict[int, Pipeline | str] = {}
    for stages in STAGES:
        try:
            cut_up = load_run(run, {"stages": stages, "recipe.overlap": "off"}, REPLICATED_PROTOCOLS)
        except ConfigError as error:
            staged[stages] = str(error).partition(": ")[2]  # what comes first names the source
            continue
        assert cut_up.gpt is not None
        if cut_up.gpt.rows != rows:  # a preset has smaller batches with stages
            rows, blocks = cut_up.gpt.rows, measure(cut_up.preset(), timer)
        staged[stages] = _pipeline(cut_up, blocks)
    return MeasuredModel(config.stages, whole, staged)


def outlooks(model: MeasuredModel, machines: PlannedSwarm) -> list[Outlook]:
    """What each way is expected to give."""
    found = [whole_model(model.whole, machines, overlaps) for overlaps in (False, True)]
    for stages, cut_up in model.staged.items():
        if isinstance(cut_up, str):
            found.append(Outlook(f"{stages} stages", stages, 0.0, cut_up))
        else:
            found.append(pipeline(model.whole, cut_up, stages, machines))
    return found


def best(found: Sequence[Outlook]) -> Outlook | None:
    """The way to take: the fastest, or one that is simpler and as fast. None: the model cannot be trained."""
    most = max(each.tokens_per_second for each in found)
    return next((each for each in found if each.tokens_per_second > (1 - CLOSE) * most), None)


def busy_share(config: RunConfig, blocks: tuple[BlockCost, ...], machines: PlannedSwarm) -> float:
    """The share of their time that machines are expected to compute, in a run with stages of these blocks."""
    work = _workload(config, blocks)
    most = sum(each.speed for each in machines.peers) * work.step_tokens / work.step_seconds
    return pipeline(work, _pipeline(config, blocks), config.stages, machines).tokens_per_second / most


def _whole(config: RunConfig) -> RunConfig:
    """The same run without stages."""
    recipe = replace(config.recipe, lookahead=None)
    return replace(config, stages=1, activations=None, gradients=None, rebalance=None, recipe=recipe)


def _workload(config: RunConfig, blocks: Sequence[BlockCost]) -> Workload:
    assert config.gpt is not None
    gpt, recipe = config.gpt, config.recipe
    tokens = gpt.rows * gpt.context
    vectors = codec(config.codec)
    return Workload(
        recipe.batches * sum(block.backward_seconds for block in blocks),
        recipe.batches * tokens,
        recipe.inner_steps * recipe.fragment_count,
        gpt.elements,
        vectors.encoded_bytes,
        4 * tokens * gpt.layers * (16 * gpt.width + gpt.heads * gpt.context),
    )


def _pipeline(config: RunConfig, blocks: tuple[BlockCost, ...]) -> Pipeline:
    assert config.gpt is not None
    tokens, width = config.gpt.rows * config.gpt.context, config.gpt.width
    activations = activation_bytes(config.activation_codec, tokens, width)
    gradients = activation_bytes(config.gradient_codec, tokens, width)
    recipe = config.recipe
    return Pipeline(blocks, recipe.batches, tokens, activations, gradients, 4 * tokens, recipe.lookahead or 0)


def table(found: Sequence[Outlook]) -> str:
    """One line for each way."""
    lines = [f"{'way':22} {'tokens/s':>10} {'peers':>9} {'memory':>9} {'sent a token':>13}  limited by"]
    for each in found:
        way = f"{each.way}, chain" if each.is_chain else each.way
        if not each.tokens_per_second:
            lines.append(f"{way:22} {'–':>10} {'':>9} {'':>9} {'':>13}  {each.limit}")
            continue
        peers = "+".join(map(str, each.peers)) if len(each.peers) <= 4 else str(sum(each.peers))
        sent = f"{each.upload_bytes_per_token:,.0f} B"
        numbers = f"{each.tokens_per_second:10,.0f} {peers:>9} {f'{each.memory_bytes / 1e9:.2f} GB':>9} {sent:>13}"
        idle = f"; {each.idle_peers} peers hold nothing" if each.idle_peers else ""
        lines.append(f"{way:22} {numbers}  {each.limit}{idle}")
    return "\n".join(lines)
