"""The task: batches of rows, the loss over their targets, the held-out loss, and text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from node.runtime.notes import warn
from node.tasks.base import Batch
from node.tasks.files import Selection, look, select
from node.tasks.flat import unfrozen
from node.tasks.given_data import DataState, GivenData
from node.tasks.gpt import next_token
from node.tasks.hf.adapters import tell_frozen_experts
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import SAMPLE_BYTES, Document, Sample, document_of, read_documents
from node.tasks.hf.data_set import find_data_set, is_streamed
from node.tasks.hf.memory import activation_bytes, tell_memory
from node.tasks.hf.model import LoadedModel, checkpoint_activations, load_model, load_tokenizer, loss_of
from node.tasks.hf.rows import MASKED, PreparedData, RowCounts, Rows, prepare, rows_of
from node.tasks.hf.settings import NO_HELD_OUT, HfSettings, HfValues, ModelError, ModelPins, foreign
from node.tasks.hf.source import find_model, template_digest, tokenizer_digest
from node.tasks.hf.streamed import StreamedRows

BASE_LOSS_TOLERANCE = 0.01
PROMPT_WORDS, PROMPT_CHARACTERS = 6, 200
_SHOWN_TOKENS = 60
EVALUATED_BATCHES = 8  # largest number of batches of an evaluation, which therefore takes less than that many steps


class HfTask:
    """A `Task` on a model of Hugging Face. `held_out` is the run's sample, as JSON lines; empty if it has none."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: HfSettings,
        *,
        rows: Rows | StreamedRows,
        evaluated: Rows,
        prompt: str,
        held_out: bytes,
        is_compiled: bool,
    ) -> None:
        self.module: nn.Module = loaded.module
        self.held_out, self.pins = held_out, loaded.pins
        self._tokenizer, self._settings, self.independent_rows = loaded.tokenizer, settings, settings.rows
        self._rows, self._evaluated, self._prompt = rows, evaluated, prompt
        self.device = next(self.module.parameters()).device
        self._call: Any = torch.compile(self.module) if is_compiled else self.module  # in training

    def trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        return unfrozen(self.module)

    def activation_bytes(self, checkpointing: bool, on_cpu: bool) -> int:
        """What a batch needs beside the parameters, as `node.ranks.memory` asks."""
        with foreign("it is not known how much memory a batch needs"):
            return activation_bytes(self.module, self._settings, checkpointing, on_cpu)

    def tensor_parallel_plan(self, ranks: int) -> Mapping[str, str]:
        """The model's own plan, by its names in the module; ValueError if it has none, or cannot be divided so."""
        if self._settings.train == "lora":
            raise ModelError("adapters cannot be divided by tensor parallel: leave out --tensor-parallel")
        module: Any = self.module
        config = module.config
        plan = getattr(config, "base_model_tp_plan", None)
        if not plan:
            raise ModelError(f"the model {config.model_type} has no plan for tensor parallel: --shard zero3 divides it")
        for name in ("num_attention_heads", "num_key_value_heads"):
            if (count := getattr(config, name, ranks)) % ranks:
                raise ModelError(f"{count} {name[4:].replace('_', ' ')} cannot be divided among {ranks} ranks")
        return {f"{module.base_model_prefix}.{name}": how for name, how in plan.items()}

    def batch(self, seed: int, position: int) -> Batch:
        return self._rows.batch(seed, position, self._settings.rows)

    def ready(self, seed: int, position: int) -> bool:
        """Whether `batch` returns at once; if not, its data are on their way from the hub."""
        return not isinstance(self._rows, StreamedRows) or self._rows.ready(seed, position)

    def targets(self, batch: Batch) -> int:
        return int((batch[-1] != MASKED).sum())

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        return loss_of(self._call if self.module.training else self.module, batch, self.device)

    def evaluate(self) -> float:
        """Mean loss over the targets of the held-out rows; nan if there are none."""
        at_once = self._settings.rows
        return evaluate_rows(self.module, self._evaluated, at_once, EVALUATED_BATCHES * at_once, self.device)

    def compare_base(self, loss: float, pins: ModelPins | None) -> None:
        """Tell the user if the base has another held-out loss on this machine than at the founder's."""
        there = pins.base_loss if pins else None
        if there and not abs(loss - there) <= BASE_LOSS_TOLERANCE * there:
            warn(
                f"before training, the model's held-out loss is {loss:.4f} on this machine and {there:.4f} at the "
                "founder's, with the same files: are the versions of transformers and torch very different?"
            )

    def generate(self, prompt: bytes, tokens: int, temperature: float = 0.0, seed: int = 0) -> bytes:
        """Continue a prompt by at most `tokens` tokens; of a chat, answer it. It ends where the model ends its text.

        Without a prompt it takes one from the held-out documents, and returns it as well.
        """
        text, chat = prompt.decode(errors="replace") or self._prompt, self._settings.format == "chat"
        ids = Encoder(self._tokenizer, chat).prompt(text)
        pieces = list(stream(self.module, self._tokenizer, ids, tokens, temperature, seed))
        decoded: str = self._tokenizer.decode(pieces, skip_special_tokens=True)
        before = "" if prompt else f"{text}\n" if chat else text
        return (before + decoded).encode(errors="replace")


def beginning(documents: Iterable[Document]) -> str:
    """The first words of the first document, or the first question of a user in it; empty if there is none."""
    for document in documents:
        if isinstance(document.content, str):
            return "".join(re.findall(r"\S+\s*", document.content)[:PROMPT_WORDS])[:PROMPT_CHARACTERS]
        for message in document.content["messages"]:
            if message["role"] == "user" and message["content"]:
                return str(message["content"])[:PROMPT_CHARACTERS]
    return ""


@torch.no_grad()
def evaluate_rows(module: Any, rows: Rows, at_once: int, most: int, device: torch.device | None = None) -> float:
    """Mean loss over the targets of at most `most` rows; nan if there are none."""
    total, count, device = 0.0, 0, device or next(module.parameters()).device
    for part in torch.split(rows.spread(most), at_once):
        batch = rows.take(part)
        if targets := int((batch[-1] != MASKED).sum()):
            total += float(loss_of(module, batch, device)) * targets
            count += targets
    return total / count if count else math.nan


@torch.no_grad()
def stream(module: Any, tokenizer: Any, prompt: list[int], tokens: int, temperature: float, seed: int) -> Iterator[int]:
    """Tokens that continue a prompt, until the model ends its text; of a long prompt only the end is used."""
    device = next(module.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    longest = getattr(module.config, "max_position_embeddings", None) or 1 << 20
    end = getattr(getattr(module, "generation_config", None), "eos_token_id", None)
    ends = {tokenizer.eos_token_id, *(end if isinstance(end, list) else [end])}
    seen = prompt[-max(longest - tokens, longest // 2) :]
    ids, past = torch.tensor([seen], device=device), None
    for _ in range(min(tokens, longest - len(seen))):
        found = module(input_ids=ids, past_key_values=past, use_cache=True)
        logits, past = found.logits[0, -1].float().cpu(), found.past_key_values
        if (token := next_token(logits, temperature, generator)) in ends:
            return
        yield token
        ids = torch.tensor([[token]], device=device)


def own_rows(
    given: GivenData,
    files: Selection | None,
    make: Callable[..., PreparedData],
    settings: HfSettings,
    held_out: bytes,
    seed: int,
    step_batches: int,
) -> tuple[Rows | StreamedRows, bytes]:
    """The rows that a peer trains on, and its own held-out documents, as JSON lines. `make` is `prepare` of its model.

    Without files the data are a data set on the hub. Of that there are no documents if the run has a sample
    (`held_out`): no window is opened then, because a peer that resumes is not at the first one.
    """
    if files:
        prepared = make(files.files, held_out=held_out or given.held_out())
        counts = prepared.counts
        given.tell([*files.lines(), *counts.lines(settings.context)])
        state = DataState(len(files.files), files.size, counts.documents + counts.held_out, counts.digest)
        given.keep(state, prepared.sample)
        return prepared.rows, prepared.sample
    assert given.place is not None
    data_set = find_data_set(given.place, settings.format == "chat")
    size = sum(each.size for each in data_set.files)
    given.keep(DataState(len(data_set.files), size, 0, f"{data_set.name}@{data_set.commit} {size}"))
    window = lambda files, home: make(files, held_out=held_out, home=home)  # noqa: E731
    rows = StreamedRows(
        data_set,
        window,
        step_batches=step_batches,
        batch_tokens=settings.rows * settings.context,
        shared=given.windows,
        ranks=given.ranks,
    )
    return rows, b"" if held_out else rows.open(seed).sample


def make_task(
    values: HfValues,
    data: GivenData,
    *,
    held_out: Path | None,
    device: str,
    dtype: torch.dtype,
    checkpointing: bool,
    seed: int,
    step_batches: int,
    ranks: int = 1,
) -> HfTask:
    """Load the model, prepare the data and the held-out rows."""
    settings, machine = values.settings, values.machine
    files = None if is_streamed(data.place) else select(data.place)  # before the model, which takes longer
    # Several ranks tell it themselves, because it depends on how they divide the training.
    look = partial(tell_memory, values, device, checkpointing) if ranks == 1 else lambda _: None
    loaded = load_model(machine.model, settings, values.pins, device, dtype, look, machine.template)
    if settings.train == "lora":
        tell_frozen_experts(loaded.module, loaded.pins.targets)
    encoder = Encoder(loaded.tokenizer, settings.format == "chat")
    sample = b""
    if held_out is not None:
        sample = read_sample(held_out)
    elif values.pins is None and machine.held_out not in ("", NO_HELD_OUT):
        sample = sample_of(Path(machine.held_out), settings)
    digest = loaded.pins.tokenizer + loaded.pins.template
    make = partial(prepare, encoder=encoder, settings=settings, tokenizer=digest)
    rows, own_sample = own_rows(data, files, make, settings, sample, seed, step_batches)
    travels = values.pins is None and machine.held_out != NO_HELD_OUT and settings.format == "text"
    documents = list(parse_sample(sample or own_sample, settings))
    evaluated = rows_of(documents, encoder, settings)
    if not len(evaluated) and machine.held_out != NO_HELD_OUT:
        what = f"no target in {len(documents)} held-out documents" if documents else "there are too few documents"
        line = f"nothing to evaluate on: {what} (hf.context = {settings.context})"
        if values.pins is None or held_out is not None:
            raise ModelError(f"{line}; give more data, a longer context, --held-out FILE or --held-out none")
        warn(f"{line}: this peer trains, and reports no held-out loss")  # each joiner of a chat run has its own
    if checkpointing:
        checkpoint_activations(loaded.module)
    return HfTask(
        loaded,
        settings,
        rows=rows,
        evaluated=evaluated,
        prompt=beginning(documents),
        held_out=b"" if held_out is not None else sample or (own_sample if travels else b""),
        is_compiled=machine.compile,
    )


def read_sample(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(SAMPLE_BYTES)
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from None


def sample_of(path: Path, settings: HfSettings) -> bytes:
    sample = Sample()
    for document in read_documents(select(path, "--held-out", splits=False).files, settings.format == "chat"):
        sample.add(document)
    if not (lines := sample.lines()):
        raise ModelError(f"{path} contains nothing to evaluate on: give other texts by --held-out, or none")
    return lines


def parse_sample(lines: bytes, settings: HfSettings) -> Iterator[Document]:
    """The documents of a run's sample, which another peer has made: what is malformed is left out."""
    for line in lines.splitlines():
        try:
            yield document_of(json.loads(line), settings.format == "chat", "")
        except (ValueError, RecursionError):  # a ModelError is a ValueError
            continue


def guessed_format(path: Path) -> str:
    """`chat` if the first document is a conversation, else `text`."""
    if is_streamed(path):
        raise ModelError("data check reads files and folders: download a file of the data set, and give that")
    files = select(path).files
    if look(files[0]).kind == "text":
        return "text"
    try:
        next(read_documents(files, True), None)
    except ModelError:
        return "text"
    return "chat"


def check_data(path: Path, model: str, settings: HfSettings, template: str = "") -> tuple[Selection, RowCounts, str]:
    """Prepare the data as a peer does: files, counts, and the beginning of the first document, targets in brackets."""
    selection = select(path)
    folder = find_model(model, weights=False)
    tokenizer, is_chat = load_tokenizer(folder, template), settings.format == "chat"
    encoder, files = Encoder(tokenizer, is_chat), selection.files
    digest = tokenizer_digest(folder.path, tokenizer) + (template_digest(tokenizer) if is_chat else "")
    data = prepare(files, encoder, settings, digest)
    first = next(read_documents(files, is_chat))
    sequences = encoder.encode(first)
    return selection, data.counts, _shown(tokenizer, *(sequences[0] if sequences else ([], [])))


def _shown(tokenizer: Any, tokens: list[int], mask: list[int]) -> str:
    """The text of the first tokens. A character may have several tokens, so the beginning is decoded as a whole."""
    tokens, mask = tokens[:_SHOWN_TOKENS], mask[:_SHOWN_TOKENS]
    changes = [at for at in range(1, len(mask)) if bool(mask[at]) != bool(mask[at - 1])]
    text, parts = "", []
    for low, high in pairwise([0, *changes, len(mask)]):
        before, text = text, str(tokenizer.decode(tokens[:high]))
        text = text.rstrip("\ufffd") if high < len(mask) or len(tokens) == _SHOWN_TOKENS else text  # cut characters
        part = text[len(before) :]
        parts.append(f"[{part}]" if mask[low] else part)
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in "".join(parts))
