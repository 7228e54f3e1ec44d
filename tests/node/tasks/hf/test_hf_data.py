"""Data of the task hf: masks of conversations, pure batches, held-out documents, one-line errors."""

from __future__ import annotations

import hashlib
import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import feather, ipc, parquet
from tokenizers.processors import TemplateProcessing

from node.tasks.files import select
from node.tasks.given_data import GivenData
from node.tasks.hf.chat import Encoder
from node.tasks.hf.corpus import Document, is_held_out, read_documents
from node.tasks.hf.model import require_faithful
from node.tasks.hf.rows import MASKED, Rows, RowWriter, prepare, rows_of
from node.tasks.hf.settings import HfSettings, ModelError
from node.tasks.hf.task import check_data, guessed_format, own_rows, parse_sample
from tests.support.paths import REPOSITORY
from tests.support.program import run
from tests.support.refusals import one_line
from tests.support.small_models import CHAT, conversations, saved_tokenizer, story, write_tokenizer

CHAT_SETTINGS = HfSettings(context=64, rows=4, format="chat")
TALK = Document(json.loads(conversations(1)), where="a.jsonl:1")


def encoder(made: Path, template: str | None = None, is_chat: bool = True) -> Encoder:
    tokenizer = saved_tokenizer(made / "qwen3")
    tokenizer.chat_template = template
    return Encoder(tokenizer, is_chat)


def test_texts_begin_and_end_as_the_tokenizer_says(made: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(200))
    parts = list(read_documents([tmp_path / "a.txt"], False))
    assert [each.begins for each in parts] == [True] + [False] * (len(parts) - 1) and len(parts) > 2
    assert [each.ends for each in parts] == [False] * (len(parts) - 1) + [True]
    tokenizer = saved_tokenizer(made / "qwen3")
    tokenizer.chat_template = None
    plain = [Encoder(tokenizer, False).encode(each)[0][0] for each in parts]
    assert [0 in tokens for tokens in plain] == [each.ends for each in parts]
    tokenizer.bos_token = "<|system|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", tokenizer.bos_token_id)]
    )
    begun = [Encoder(tokenizer, False).encode(each)[0][0] for each in parts]
    assert begun == [[tokenizer.bos_token_id, *plain[0]], *plain[1:]]


def test_model_without_template_is_refused(made: Path) -> None:
    with pytest.raises(ModelError, match="has no chat template"):
        encoder(made, None)


@given(
    documents=st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=12),
    pack=st.booleans(),
    kind=st.sampled_from(["text", "chat"]),
)
def test_rows_keep_every_token_and_target(documents: list[list[bool]], pack: bool, kind: Any) -> None:
    settings = HfSettings(context=16, rows=1, format=kind, pack=pack)
    found: list[tuple[list[int], bytes]] = []
    writer = RowWriter(settings, lambda tokens, flags: found.append((list(tokens), bytes(flags))))
    for number, mask in enumerate(documents, 1):
        writer.add([([1000 * number + index for index in range(len(mask))], [int(each) for each in mask])])
    writer.flush()
    rows = Rows(
        torch.tensor([tokens for tokens, _ in found], dtype=torch.int32).view(-1, 16),
        torch.tensor([list(flags) for _, flags in found], dtype=torch.uint8).view(-1, 16),
    )
    tokens, positions, labels = rows.take(torch.arange(len(rows)))
    longest = 16 if kind == "chat" else 40
    cut = [(number, mask[:longest]) for number, mask in enumerate(documents, 1)]
    learnt = [(number, mask) for number, mask in cut if any(mask[1:])]  # from others nothing is to be learnt
    assert tokens[tokens > 0].tolist() == [
        1000 * number + index for number, mask in learnt for index in range(len(mask))
    ]
    assert writer.counts.skipped == len(documents) - len(learnt)
    assert int((labels != MASKED).sum()) == writer.counts.targets and bool(len(rows)) == bool(learnt)
    for row in range(len(rows)):
        for at in range(15):
            if labels[row, at] != MASKED:  # the next token, of the same document, and a target there
                assert labels[row, at] == tokens[row, at + 1] == tokens[row, at] + 1
                assert positions[row, at + 1] == positions[row, at] + 1
                number, index = divmod(int(labels[row, at]), 1000)
                assert documents[number - 1][index]
    if kind == "chat" or not pack:
        starts = (positions == 0) & (tokens > 0)
        assert pack or (starts.sum(1) <= 1).all()


def hashes(home: Path) -> list[str]:
    rows = prepare(
        select(home / "story.txt").files, encoder(home, is_chat=False), HfSettings(context=32, rows=4), "t"
    ).rows
    batches = [rows.batch(seed, position, 4) for seed, position in ((7, 0), (7, 90), (8, 0), (7, 0))]
    return [hashlib.sha256(b"".join(part.numpy().tobytes() for part in batch)).hexdigest() for batch in batches]


def test_batches_depend_on_seed_and_position_alone(made: Path) -> None:
    """Tokenised, and mapped."""
    first = hashes(made)
    assert hashes(made) == first and first[0] == first[3] and len(set(first)) == 3


@pytest.mark.long
def test_batches_are_the_same_in_another_process(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hashes(made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    program = f"from pathlib import Path; from {__name__} import hashes; print(hashes(Path({str(made)!r})))"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    assert run(program, environment=environment)[0] == f"{first}\n"


@pytest.mark.parametrize("count", (1, 3, 5, 30))
def test_stream_takes_each_row_once_an_epoch(count: int) -> None:
    rows = Rows(torch.arange(10, dtype=torch.int32)[:, None], torch.zeros(10, 1, dtype=torch.uint8))
    drawn = [row for at in range(30 // count) for row in rows.batch(5, at, count)[0].flatten().tolist()]
    epochs = [drawn[low : low + 10] for low in (0, 10, 20)]
    assert all(sorted(each) == list(range(10)) for each in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != rows.batch(6, 0, 10)[0].flatten().tolist()


def test_held_out_documents_are_never_trained_on(made: Path) -> None:
    settings = HfSettings(context=64, rows=4)
    files, plain = select(made / "story.txt").files, encoder(made, is_chat=False)
    data = prepare(files, plain, settings, "t")
    held = [document.content for document in parse_sample(data.sample, settings)]
    training = [each.content for each in read_documents(files, False) if not is_held_out(each)]
    assert held and not set(held) & set(training) and data.counts.held_out == len(held)
    assert data.counts.tokens == sum(
        len(plain.encode(each)[0][0]) for each in read_documents(files, False) if each.content in training
    )
    assert len(rows_of(parse_sample(data.sample, settings), plain, settings))
    few = made.parent / "few.jsonl"
    few.write_text("".join(json.dumps({"text": story(9, first)}) + "\n" for first in (0, 50, 90)))
    counts = prepare([few], plain, settings, "t").counts
    assert (counts.documents, counts.held_out) == (2, 1)


def test_documents_of_the_sample_are_not_trained_on(made: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": story(9, first)}) + "\n" for first in (0, 50, 90, 120)]
    shared = "".join(lines[1:3]).encode()
    (tmp_path / "mine.jsonl").write_text("".join(lines))
    files, plain, settings = [tmp_path / "mine.jsonl"], encoder(made, is_chat=False), HfSettings(context=64, rows=4)
    everything = [prepare(files, plain, settings, "t", held).counts for held in (b"", shared)]
    assert [(each.documents, each.held_out) for each in everything] == [(3, 1), (2, 2)]
    own = prepare(files, plain, settings, "t").sample
    (tmp_path / "cache" / "starling").chmod(0o500)  # nothing is written: a founder that starts again has these rows
    assert prepare(files, plain, settings, "t", own).counts == everything[0]
    (tmp_path / "cache" / "starling").chmod(0o700)


def test_rows_are_made_again_after_change_or_damage(made: Path, tmp_path: Path, cache: Path) -> None:
    file, plain, settings = tmp_path / "a.txt", encoder(made, is_chat=False), HfSettings(context=64, rows=4)
    file.write_text(story(40))
    kept = file.stat()
    first = prepare([file], plain, settings, "t").rows.take(torch.arange(3))[0]
    file.write_text(story(40).replace("Ann", "Bob"))
    os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    changed = prepare([file], plain, settings, "t").rows.take(torch.arange(3))[0]
    assert not torch.equal(first, changed)
    for each in cache.glob("rows-*/tokens.bin"):
        each.write_bytes(b"")
    assert torch.equal(prepare([file], plain, settings, "t").rows.take(torch.arange(3))[0], changed)
    for each in cache.glob("rows-*"):
        os.utime(each, (1e9, 1e9))
    file.write_text(story(41))
    prepare([file], plain, settings, "t")
    assert len(list(cache.iterdir())) == 1, "rows unused for long are removed"


def test_tokenizer_without_an_end_of_text_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tokenizer(tmp_path)
    tokenizer = saved_tokenizer(tmp_path)
    require_faithful(tokenizer, tmp_path / "tokenizer.json")
    assert "eos_token" not in capsys.readouterr().err
    tokenizer.eos_token = None
    require_faithful(tokenizer, tmp_path / "tokenizer.json")
    assert "the tokenizer has no eos_token: the model does not learn where a text ends" in capsys.readouterr().err


def test_empty_shard_does_not_decide_the_format(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"text": "one"}')
    assert guessed_format(tmp_path) == "text"
    (tmp_path / "b.jsonl").write_text('{"prompt": "one", "completion": "two"}')
    assert guessed_format(tmp_path) == "chat"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ModelError, match=r"a\.parquet: two columns have the name text: rename or remove"):
        list(read_documents([tmp_path / "a.parquet"], False))


def test_parquet_holds_texts_and_conversations(tmp_path: Path) -> None:
    file = tmp_path / "data.parquet"
    messages: Any = TALK.content["messages"]  # type: ignore[index]
    talks = [messages, messages[:2]]
    parquet.write_table(pyarrow.table({"text": ["one", "two\n"], "messages": talks}), file)
    assert [each.content for each in read_documents(select(tmp_path).files, False)] == ["one", "two\n"]
    assert [each.content for each in read_documents([file], True)] == [{"messages": each} for each in talks]
    parquet.write_table(pyarrow.table({"prompt": ["q"] * 300, "completion": [*["a"] * 299, None]}), file)
    with pytest.raises(ModelError, match=r"data\.parquet: row 300: has no \"messages\""):
        list(read_documents([file], True))
    content = bytearray(file.read_bytes())
    content[30:200] = bytes(170)
    for damaged in (bytes(content), b"PAR1", b""):
        file.write_bytes(damaged)
        assert "data.parquet" in one_line(ModelError, lambda: [*read_documents([file], True)])


def test_arrow_files_and_packed_rows_are_read(tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2], "text": ["one", "two\n"]})
    feather.write_feather(table, tmp_path / "a.feather")
    with ipc.new_stream(str(tmp_path / "b.arrow"), table.schema) as stream:
        stream.write_table(table)
    with pyarrow.output_stream(tmp_path / "c.jsonl.zst", compression="zstd") as file:
        file.write(b'{"text": "one"}\n{"text": "two\\n"}\n')
    parquet.write_table(table, tmp_path / "without suffix")
    assert [each.content for each in read_documents(select(tmp_path).files, False)] == ["one", "two\n"] * 4
    parquet.write_table(table.rename_columns(["id", "content"]), tmp_path / "d.parquet")
    with pytest.raises(
        ModelError, match=r"d\.parquet: row 1: has no .text. .it has id, content: rename content to text"
    ):
        list(read_documents([tmp_path / "d.parquet"], False))
    for damaged in (b"ARROW1\0\0" + bytes(50), b"\xff\xff\xff\xff\0\0", b""):
        (tmp_path / "b.arrow").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"b\.arrow"):
            list(read_documents([tmp_path / "b.arrow"], False))


def test_equal_documents_and_replaced_characters_are_counted(made: Path, tmp_path: Path) -> None:
    """However the documents are divided into files, in whatever order: they are the same data."""
    lines = [json.dumps({"text": story(9, first)}) + "\n" for first in range(0, 400, 10)]
    half = json.dumps({"text": "half \ud83d of a pair, and \ufffd"}) + "\n"
    plain, settings = encoder(made, is_chat=False), HfSettings(context=64, rows=4)
    found = []
    for name, content in (("a", [*lines, half]), ("b", [half, *reversed(lines), *lines[:7], half])):
        (tmp_path / f"{name}.jsonl").write_text("".join(content))
        found.append(prepare([tmp_path / f"{name}.jsonl"], plain, settings, "t"))
    assert [each.counts.repeated for each in found] == [0, 8] and {each.counts.replaced for each in found} == {2}
    assert len({(each.counts.documents, each.counts.digest, each.sample) for each in found}) == 1
    assert (
        len({tuple(each.rows.take(torch.arange(len(each.rows)))[0].flatten().sort().values.tolist()) for each in found})
        == 1
    )
    (tmp_path / "one.txt").write_text("only a few words")
    alone = prepare([tmp_path / "one.txt"], plain, settings, "t").counts
    assert (alone.documents, alone.held_out) == (1, 0), "a document is trained on if it is the only one"


def test_table_is_told_at_the_start_and_what_is_held_out_stays(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, settings = tmp_path / "chats", CHAT_SETTINGS
    data.mkdir()
    (data / "a.jsonl").write_text("".join(conversations(3)))
    (data / "README.md").write_text("about them")
    encode, sample = encoder(made, CHAT), b""
    for more, told in ((0, True), (0, False), (40, True)):
        if more:
            (data / "b.jsonl").write_text("".join(conversations(3 + more)))
        given_data = GivenData(data, tmp_path / "data.json", told)
        make = partial(prepare, encoder=encode, settings=settings, tokenizer="t")
        _, held = own_rows(given_data, select(data), make, settings, b"", 1, 1)
        lines = [line.removeprefix("note: ") for line in capsys.readouterr().err.splitlines()]
        if told:
            assert [line.split()[0] for line in lines[:6]] == [
                "taken",
                "left",
                "documents",
                "tokens",
                "characters",
                "rows",
            ]
        changes = [line for line in lines if line.startswith("the data have changed")]
        assert bool(changes) is bool(more) and len(lines) == 6 * told + bool(more)
        assert set(sample.splitlines()) <= set(held.splitlines())
        sample = held
    assert re.search(r"then 1 file, .* bytes, 3 documents; now 2 files, .* kB, 43 documents", changes[0])


def test_strangers_sample_cannot_break_a_joiner(made: Path) -> None:
    lines = b'{"text": "good"}\n{"text"\n[]\n7\nnull\n{"messages": 3}\n\xff\xfe\n{"text": 5}\n' + b"[" * 9999
    assert [each.content for each in parse_sample(lines, HfSettings())] == ["good"]
    (half,) = parse_sample(b'{"text": "a\\ud800b"}', HfSettings())
    assert encoder(made, is_chat=False).encode(half)[0][0], "no tokenizer takes half a surrogate pair"
    talk = b'{"messages": [{"role": "user", "content": "x"}]}\n{"messages": [1]}\n{"messages": "ab"}\n{"text": "a"}'
    assert len(list(parse_sample(talk, CHAT_SETTINGS))) == 1


@pytest.mark.parametrize(
    "content, is_chat, words",
    [
        ('{"text": "a"}\n\n[1]\n', False, "data.jsonl:3: not an object"),
        ('{"messages": []}\n', False, 'has no "text"; of conversations, train with hf.format = "chat"'),
        ('{"text": "a"}\n', True, 'data.jsonl:1: has no "messages"'),
        ('{"messages": [{"role": "user", "content": ["a"]}]}\n', True, "content of the kind ? is not trained"),
        ('{"messages": ["a"]}\n', True, "a message is an object"),
    ],
)
def test_malformed_data_are_named(tmp_path: Path, content: str, is_chat: bool, words: str) -> None:
    (tmp_path / "data.jsonl").write_text(content)
    assert words in one_line(ModelError, lambda: [*read_documents([tmp_path / "data.jsonl"], is_chat)])
    assert "give a file or a folder by --data" in one_line(ModelError, select, None)


def test_check_counts_and_shows_what_is_masked(made: Path, tmp_path: Path) -> None:
    assert (guessed_format(made / "chat.jsonl"), guessed_format(made / "story.txt")) == ("chat", "text")
    _, counts, shown = check_data(made / "chat.jsonl", str(made / "qwen3"), CHAT_SETTINGS)
    assert counts.documents + counts.held_out + counts.repeated == 60 and 0.2 < counts.targets / counts.tokens < 0.5
    assert "<|assistant|>[N0 has 0 cats.<|end|>]" in shown
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Ännchen 你好 🙂 \u202e!" + "é" * 99}) + "\n")
    shown = check_data(tmp_path / "a.jsonl", str(made / "qwen3"), HfSettings(context=64, rows=4))[2]
    assert shown.startswith("[Ännchen 你好 🙂 \\u202e!éé") and "\ufffd" not in shown
