"""The manifest: one spelling, an id that must not change by accident, and one-line errors for hostile bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.manifest import FORMAT, Manifest, ManifestError, StageEntry, layout_digest, seal, unseal
from node.config.run_config import RunConfig, load_run
from node.config.task_tables import GptTable, PacedTable
from node.config.toml import MAX_BYTES
from node.joining.run_selector import require_consent
from node.tasks.recipe import Recipe
from protocols.base import Layout, Member
from tests.sim.host import SimSigner
from tests.support.refusals import one_line

FOUNDER = SimSigner("founder", seed=0)
JOINER = SimSigner("joiner", seed=0)
LARGEST = 2**31
"""Elements: what no manifest may exceed, whatever else it says."""

# Every value written out, so that a change of a default or of a preset leaves it as it is.
RECIPE = Recipe(
    inner_steps=50, rounds=16, learning_rate=2e-3, outer_learning_rate=0.9, outer_momentum=0.5, batches=1,
    betas=(0.9, 0.95), weight_decay=0.1, clip_norm=1.0, warmup_steps=20, final_fraction=0.1,
)  # fmt: skip
CONFIG = RunConfig(
    name="golden",
    task="gpt",
    protocol="butterfly",
    codec="int8",
    fork="allowed",
    min_peers=2,
    spread_limit=0.02,
    seed=7,
    chunk_elements=262_144,
    recipe=RECIPE,
    gpt=GptTable(layers=1, width=8, heads=2, context=16, rows=4),
)
assert CONFIG.elements
MANIFEST = Manifest(
    config=CONFIG,
    founder=Member("founder", 3),
    elements=(CONFIG.elements,),
    state_root=bytes(range(32)),
    held_out=bytes(range(32, 64)),
    created=1_500_000_000.25,
)
GOLDEN_RUN_ID = "be0709cccf09e4f40d20c12c51dcad1eca485b0e59d829dbd6e883ed20037998"
GOLDEN = (
    b'{"config":{"chunk_elements":262144,"codec":"int8","fork":"allowed","gpt":{"context":16,"heads":2,"la',
    b'yers":1,"rows":4,"width":8},"min_peers":2,"name":"golden","protocol":"butterfly","recipe":{"batches"',
    b':1,"betas":[0.9,0.95],"clip_norm":1.0,"decay":"all","final_fraction":0.1,"inner_optimizer":"adamw","',
    b'inner_steps":50,"learning_rate":0.002,"mean":"batch","outer_learning_rate":0.9,"outer_momentum":0.5,',
    b'"rounds":16,"warmup_steps":20,"weight_decay":0.1},"robust":"mean","schedule":"random","seed":7,"spre',
    b'ad_limit":0.02,"stages":1,"task":"gpt"},"created":1500000000.25,"elements":[5144],"founder":{"incarn',
    b'ation":3,"peer":"founder"},"held_out":"202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3',
    b'e3f","state_root":"000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"}',
)


def opened(envelope: bytes, expected: str | None = None) -> Manifest:
    return unseal(envelope, JOINER.verify, expected)


def refusal(envelope: bytes, expected: str | None = None) -> str:
    line = one_line(ManifestError, opened, envelope, expected)
    assert len(line) < 700
    return line


def signed(encoded: bytes) -> bytes:
    """An envelope from a founder that signs any bytes."""
    envelope: bytes = msgpack.packb([FORMAT, encoded, FOUNDER.sign(b"starling manifest 1\n" + encoded)])
    return envelope


def spelt(tree: object) -> bytes:
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def changed(change: Callable[[Any], None]) -> bytes:
    """A signed envelope in which the manifest's tree was changed."""
    tree = json.loads(MANIFEST.encode())
    change(tree)
    return signed(spelt(tree))


def put(value: object, *path: str) -> bytes:
    def change(tree: Any) -> None:
        for name in path[:-1]:
            tree = tree[name]
        tree[path[-1]] = value

    return changed(change)


def test_manifest_format_is_stable() -> None:
    """A difference means that peers of two versions cannot be in one run: raise `FORMAT`, and say so."""
    assert MANIFEST.encode() == b"".join(GOLDEN)
    assert MANIFEST.run_id == GOLDEN_RUN_ID
    assert seal(MANIFEST, FOUNDER) == signed(MANIFEST.encode())


@pytest.mark.parametrize("overrides", [{}, {"task": "paced"}, {"name": "Zürich", "gpt.preset": "w64"}])
def test_sealed_manifest_round_trips(overrides: dict[str, object]) -> None:
    config = load_run(None, overrides, ["butterfly"])
    assert config.elements
    made = replace(MANIFEST, config=config, elements=(config.elements - 1, 1), held_out=bytes(32))
    envelope = seal(made, FOUNDER)
    assert len(envelope) < 2000
    for expected in (None, made.run_id, made.run_id[:12], made.run_id.upper()):
        assert opened(envelope, expected) == made


def test_wrong_run_error_names_both_ids() -> None:
    line = refusal(seal(MANIFEST, FOUNDER), "ab" * 32)
    assert MANIFEST.run_id in line and "ab" * 32 in line
    assert "this is run" in refusal(seal(MANIFEST, FOUNDER), MANIFEST.run_id[:11])
    assert "this is run" in refusal(seal(MANIFEST, FOUNDER), "")
    assert "\\x1b" in refusal(seal(MANIFEST, FOUNDER), "\x1b\n")


@pytest.mark.parametrize(
    "envelope, words",
    [
        (bytes(MAX_BYTES + 1), "65537 bytes, more than 65536"),
        (b"", "damaged"),
        (seal(MANIFEST, FOUNDER)[:-1], "damaged"),
        (seal(MANIFEST, FOUNDER) + b"\0", "damaged"),
        (b"\x91" * 60_000, "damaged"),
        (b"\xdd\xff\xff\xff\xff", "damaged"),
        (msgpack.packb([FORMAT + 1, b"", b""]), "has format 3, this version reads 2: update"),
        (
            msgpack.packb([FORMAT - 1, b"", b""]),
            "has format 1, this version reads 2: use the version that founded",
        ),
        (msgpack.packb([True, b"", b""]), "no manifest"),
        (msgpack.packb([FORMAT, b""]), "no manifest"),
        (msgpack.packb([FORMAT, "", ""]), "not in its canonical spelling"),
        (b"\x93\xcc\x02" + seal(MANIFEST, FOUNDER)[2:], "not in its canonical spelling"),
        (seal(MANIFEST, JOINER), "not signed by its founder"),
        (seal(replace(MANIFEST, founder=Member("joiner")), FOUNDER), "not signed by its founder"),
        (msgpack.packb([FORMAT, MANIFEST.encode(), b""]), "not signed by its founder"),
        (seal(MANIFEST, FOUNDER).replace(b'"learning_rate"', b'"mearning_rate"'), "not signed by its founder"),
        (signed(b""), "Invalid JSON"),
        (signed(b"[" * 60_000), "recursion limit"),
        (signed(MANIFEST.encode() + b" "), "not in its canonical spelling"),
        (signed(MANIFEST.encode().replace(b'"created":', b'"created":1.0,"created":')), "not in its canonical"),
        (signed(json.dumps(json.loads(MANIFEST.encode())).encode()), "not in its canonical spelling"),
        (signed(b"[]"), "must be an object"),
        (put(1, "created"), "not in its canonical spelling"),
        (put("AB" * 32, "held_out"), "not in its canonical spelling"),
        (changed(lambda tree: tree.pop("held_out")), "not in its canonical spelling"),
        (changed(lambda tree: tree.pop("state_root")), '"state_root" is missing'),
        (put(3, "extra"), 'unknown key "extra"'),
        (put(3, "config", "ex\x1b\n"), "unknown key"),
        (put(3, "config"), '"config" must be an object, not 3'),
        (put("00" * 31, "state_root"), "at least 32 bytes"),
        (put("zz" * 32, "state_root"), "must be valid hex"),
        (put(float("nan"), "created"), "finite"),
        (put(-1.0, "created"), "at least 0"),
        (put("x" * 129, "founder", "peer"), "peer id"),
        (put("\x1b[2J", "founder", "peer"), "peer id"),
        (put(-1, "founder", "incarnation"), "incarnation"),
        (put(1 << 60, "founder", "incarnation"), "incarnation"),
        (put([], "elements"), "at least 1 item"),
        (put([1] * 65, "elements"), "at most 64 items"),
        (put([0, CONFIG.elements], "elements"), "at least 1"),
        (put([CONFIG.elements + 1], "elements"), "the task takes"),
        (put([LARGEST + 1], "elements"), "at most"),
        (put(1 << 40, "config", "gpt", "layers"), "at most 1024"),
        (put(1 << 15, "config", "gpt", "width"), "parameters, more than"),
        (put("x" * 65, "config", "name"), "at most 64 characters"),
        (put("int9", "config", "codec"), "unknown codec 'int9'"),
        (put(0, "config", "recipe", "rounds"), "rounds must be"),
        (put(int("9" * 4000), "config", "recipe", "rounds"), "rounds"),
        (put({"elements": 5}, "config", "paced"), "no other task's"),
    ],
)
def test_malformed_manifest_gives_one_line_error(envelope: bytes, words: str) -> None:
    assert words in refusal(envelope)


def test_largest_run_is_bounded() -> None:
    config = replace(CONFIG, task="paced", gpt=None, paced=PacedTable(elements=LARGEST))
    assert replace(MANIFEST, config=config, elements=(LARGEST,)).config.elements == LARGEST
    with pytest.raises(ValueError, match="less than or equal to 2147483648"):
        PacedTable(elements=LARGEST + 1)


@given(st.binary(max_size=500))
def test_random_bytes_are_rejected(envelope: bytes) -> None:
    refusal(envelope)


@given(st.data())
def test_mutated_envelope_is_rejected(data: st.DataObject) -> None:
    envelope = bytearray(seal(MANIFEST, FOUNDER))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(envelope) - 1))
        envelope[at] ^= data.draw(st.integers(1, 255))
    if bytes(envelope) != seal(MANIFEST, FOUNDER):
        refusal(bytes(envelope))


FOREIGN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


def paths(tree: Any, *start: str) -> list[tuple[str, ...]]:
    if not isinstance(tree, dict):
        return [start]
    return [path for name, value in tree.items() for path in paths(value, *start, name)] + [start] * bool(start)


@given(st.sampled_from(paths(json.loads(MANIFEST.encode()))), FOREIGN)
def test_any_signed_value_is_accepted_or_rejected(path: tuple[str, ...], value: object) -> None:
    """The founder signs any value: an accepted manifest is in range, and reads back the same."""
    try:
        manifest = opened(put(value, *path))
    except ManifestError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert opened(seal(manifest, FOUNDER)) == manifest
        assert manifest.config.elements == sum(manifest.elements) <= LARGEST


# -- parameters, and users' own tasks ---------------------------------------------------------------------------------

LAYOUT = Layout(((("a", (2, 3)), ("b", (4,))),))
OWN = replace(CONFIG, task="mine.tasks:make", gpt=None, options={"width": 3})


def test_worker_layout_must_match_the_manifest() -> None:
    manifest = replace(MANIFEST, config=OWN, elements=(10,), layout=layout_digest(LAYOUT))
    manifest.require_layout(LAYOUT)
    assert opened(seal(manifest, FOUNDER)) == manifest
    renamed, turned = Layout(((("a", (2, 3)), ("c", (4,))),)), Layout(((("a", (3, 2)), ("b", (4,))),))
    for other in (renamed, turned, Layout((LAYOUT.fragments[0][::-1],))):
        message = r"^on this machine the model has other tensors than in this run: use the version of m"
        with pytest.raises(ManifestError, match=message):
            manifest.require_layout(other)
    message = r"^on this machine the model has \(6,\) parameters, in this run \(10,\): use the version"
    with pytest.raises(ManifestError, match=message):
        manifest.require_layout(Layout(((("a", (2, 3)),),)))
    replace(manifest, layout=None).require_layout(renamed)


def test_own_task_size_is_bounded() -> None:
    replace(MANIFEST, config=OWN, elements=(LARGEST,))
    with pytest.raises(ValueError, match=f"the manifest has {LARGEST + 1} elements, more than {LARGEST}"):
        replace(MANIFEST, config=OWN, elements=(LARGEST, 1))


@pytest.mark.parametrize(
    "config, named, words",
    [
        (OWN, None, "own, mine.tasks:make: its code never comes from peers; if you have its module mine.tasks from"),
        (OWN, "mine.tasks:other", "mine.tasks:make, not mine.tasks:other: its code never comes"),
        (CONFIG, "mine.tasks:make", "this run trains gpt, not mine.tasks:make: join it without --task"),
    ],
)
def test_own_task_import_requires_local_consent(config: RunConfig, named: str | None, words: str) -> None:
    manifest = replace(MANIFEST, config=config, elements=(5144,))
    for held in ("", "ab" * 32, manifest.run_id if named else ""):
        line = one_line(ManifestError, require_consent, manifest, named, held)
        assert words in line and (named == "mine.tasks:make" or line.endswith("join with --task mine.tasks:make"))


# -- stages ------------------------------------------------------------------------------------------------------------


def staged(**changes: Any) -> Manifest:
    """Two stages of the golden configuration's three blocks."""
    stages = (
        StageEntry(end=2, state_root=MANIFEST.state_root, layout=layout_digest(LAYOUT)),
        StageEntry(end=3, state_root=bytes(32), layout=bytes(32)),
    )
    total = MANIFEST.elements[0]
    values: dict[str, Any] = {"config": replace(CONFIG, stages=2), "elements": (5, total - 5), "stages": stages}
    return replace(MANIFEST, **values | changes)


def test_stages_round_trip_and_describe_each_stage() -> None:
    manifest = staged()
    assert opened(seal(manifest, FOUNDER)) == manifest and manifest.run_id != MANIFEST.run_id
    assert manifest.bounds == (0, 2, 3) and MANIFEST.bounds == (0,)
    assert [manifest.scope(stage) for stage in (0, 1)] == ["run/stage/0", "run/stage/1"] and MANIFEST.scope(0) == "run"
    assert manifest.elements_of(1) == (MANIFEST.elements[0] - 5,) and MANIFEST.elements_of(0) == MANIFEST.elements
    assert manifest.root_of(1) == bytes(32) and MANIFEST.root_of(0) == MANIFEST.state_root
    assert manifest.costs == (1.0, 1.0) and b"cost" not in manifest.encode()
    uneven = staged(stages=(replace(manifest.stages[0], cost=0.25), manifest.stages[1]))  # type: ignore[index]
    assert opened(seal(uneven, FOUNDER)).costs == (0.25, 1.0)
    with pytest.raises(ValueError, match="cost"):
        replace(manifest.stages[0], cost=0.0)  # type: ignore[index]
    with pytest.raises(ManifestError, match="on this machine the model has"):
        manifest.require_layout(LAYOUT, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": None}, "the run has 2 stages, the manifest describes 0"),
        ({"config": CONFIG}, "the run has no stages, the manifest describes 2"),
        ({"elements": (MANIFEST.elements[0],)}, "the run has 2 stages"),
        ({"stages": staged().stages[::-1]}, "the stages' blocks are not in order"),  # type: ignore[index]
        ({"stages": (staged().stages[0], replace(staged().stages[1], end=4))}, "have 4 blocks, the model has 3"),  # type: ignore[index]
        ({"state_root": bytes(32)}, "not that of stage 0"),
    ],
)
def test_inconsistent_stages_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        staged(**changes)
