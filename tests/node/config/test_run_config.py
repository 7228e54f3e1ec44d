"""A run's configuration from its file and flags: which source wins, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.run_config import RunConfig, _parse, load_run
from node.config.task_tables import GptTable
from node.config.toml import MAX_BYTES, ConfigError, canonical
from node.tasks.flat import flatten
from node.tasks.gpt import Gpt
from node.tasks.gpt_presets import PRESETS, recipe_for
from node.tasks.paced import Paced
from node.tasks.recipe import MAX_ELEMENTS, Recipe
from protocols.vectors.robust import RULES
from tests.support.refusals import one_line

PROTOCOLS = ("butterfly", "moshpit", "gossip")


def run(overrides: Mapping[str, object] | None = None) -> RunConfig:
    return load_run(None, overrides or {}, PROTOCOLS)


def refusal(file: Path | None, overrides: Mapping[str, object] | None = None) -> str:
    return one_line(ConfigError, load_run, file, overrides or {}, PROTOCOLS)


def test_missing_pull_averages_states() -> None:
    gossip = run({"protocol": "gossip"})
    assert gossip.recipe.outer_pull is None and b"pull" not in canonical(gossip)
    pulls = {"protocol": "gossip", "recipe.outer_pull": 0.3, "recipe.rounds": 80}
    config = run(pulls)
    assert (config.recipe.outer_momentum, config.recipe.outer_decay) == (0.5, None), "the pull depends on it"
    adamw = run({**pulls, "recipe.inner_optimizer": "adamw"})
    assert adamw.recipe.learning_rate == 4e-3, "the higher rate belongs to more momentum"
    assert config.recipe.outer_pull == 0.3 and _parse(canonical(config)) == config


def test_adamw_takes_the_place_of_the_presets_muon() -> None:
    config = run({"recipe.inner_optimizer": "adamw"})
    assert (config.recipe.inner_optimizer, config.recipe.learning_rate) == ("adamw", 4e-3)
    assert run({}).recipe.inner_optimizer == "muon"


@pytest.mark.parametrize("rounds", [16, 80])
def test_sparse_means_take_plain_outer_steps(rounds: int) -> None:
    recipe = run({"codec": "topk", "recipe.rounds": rounds}).recipe
    assert (recipe.outer_learning_rate, recipe.outer_momentum, recipe.outer_decay) == (1.0, 0.0, None)
    assert run({"codec": "topk", "recipe.outer_momentum": 0.5}).recipe.outer_momentum == 0.5, "unless it is given"


@pytest.mark.parametrize("rounds", [16, 80])
def test_fragments_take_the_outer_step_of_whole_rounds(rounds: int) -> None:
    """As a round of each fragment is as long as one of all."""
    whole = run({"recipe.rounds": rounds, "recipe.inner_steps": 48}).recipe
    cut = run({"recipe.rounds": 4 * rounds, "recipe.inner_steps": 12, "recipe.fragments": 4}).recipe
    assert replace(cut, rounds=rounds, inner_steps=48, fragments=None) == whole


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_stored_by_its_values(name: str) -> None:
    config = run({"gpt.preset": name})
    assert config.preset() == PRESETS[name]
    assert name.encode() not in canonical(config)


def test_flags_override_file_and_file_overrides_preset(file: Path) -> None:
    file.write_text('name = "mine"\n[recipe]\nrounds = 3\ninner_steps = 7\n[gpt]\npreset = "w64"\nwidth = 32\n')
    config = load_run(file, {"recipe.rounds": 5, "gpt.rows": 2, "name": None}, PROTOCOLS)
    assert config.name == "mine"
    assert (config.recipe.rounds, config.recipe.inner_steps) == (5, 7)
    assert config.recipe.learning_rate == PRESETS["w64"].recipe.learning_rate
    assert load_run(file, {"recipe.rounds": 80}, PROTOCOLS).recipe == recipe_for(64, 80, 7)
    assert config.gpt == GptTable(layers=4, width=32, heads=4, context=128, rows=2)


def test_preset_flag_keeps_file_values(file: Path) -> None:
    file.write_text("[gpt]\npreset = 'w64'\ncontext = 64\n")
    shape = load_run(file, {"gpt.preset": "w96"}, PROTOCOLS).preset().shape
    assert (shape.width, shape.context) == (96, 64)


def test_paced_run_has_its_own_recipe(file: Path) -> None:
    file.write_text("[gpt]\nwidth = 64\n[paced]\nelements = 5000\nstep_seconds = 1\n")
    config = load_run(file, {"task": "paced"}, PROTOCOLS)
    assert config.paced is not None and config.gpt is None
    assert (config.elements, config.paced.step_seconds) == (5000, 1.0)
    assert (config.recipe.inner_steps, config.recipe.rounds) == (20, 10_000)
    assert (config.recipe.outer_learning_rate, config.recipe.outer_momentum) == (0.9, 0.5)
    with pytest.raises(ValueError, match="no model"):
        config.preset()


def test_own_task_has_name_and_options(file: Path) -> None:
    file.write_text(
        "task = 'pkg.mine:make'\n[gpt]\nwidth = 64\n[options]\nrows = 3\nrate = 1.0\nfast = true\nof = 'é'\n"
    )
    config = load_run(file, {"recipe.rounds": 5}, PROTOCOLS)
    assert (config.own_task, config.gpt, config.paced, config.elements) == ("pkg.mine:make", None, None, None)
    assert config.options == {"rows": 3, "rate": 1.0, "fast": True, "of": "é"}
    assert config.recipe == Recipe(50, 5, 2e-3, 0.9, 0.5, mean="token", decay="matrices")
    older = load_run(file, {"recipe.rounds": 5, "recipe.mean": "batch", "recipe.decay": "all"}, PROTOCOLS)
    assert older.recipe == Recipe(50, 5, 2e-3, 0.9, 0.5)
    again = _parse(canonical(config))
    assert again == config and again.options is not None and isinstance(again.options["rate"], float)
    assert run({"task": "mine:make"}).options == {} and run().own_task == ""


@pytest.mark.parametrize(
    "name",
    [
        "mine", "mine:", ":make", "a..b:c", ".a:b", "a:b.c", "1a:b", "a-b:c", "a:b\n", "ä:b", "a: b", "a;b:c",
        f"{'a' * 64}:{'b' * 64}",
    ],
)  # fmt: skip
def test_only_module_and_factory_name_own_task(name: str) -> None:
    assert "is not a task: gpt, paced, hf, loop, or your own as package.module:factory" in refusal(None, {"task": name})
    for valid in ("mine:make", "a.b_c.D1:_e", f"{'a' * 62}:{'b' * 65}"):
        assert run({"task": valid}).own_task == valid


def test_peer_table_does_not_change_the_run(file: Path) -> None:
    file.write_text("[peer]\nnickname = 'a'\n")
    assert load_run(file, {}, PROTOCOLS) == run()


@pytest.mark.parametrize("layers, width, heads, context", [(1, 8, 2, 4), (3, 48, 4, 16)])
def test_element_count_matches_trained_parameters(layers: int, width: int, heads: int, context: int) -> None:
    table = GptTable(layers=layers, width=width, heads=heads, context=context, rows=1)
    assert (table.elements,) == flatten(Gpt(table.shape)).layout.sizes()
    assert (run({"task": "paced", "paced.elements": 77}).elements,) == Paced(77, seed=0).layout.sizes()


def test_fork_setting_gives_the_fork_peers() -> None:
    assert run({"min_peers": 3}).fork_peers == 3
    assert run({"min_peers": 3, "fork": "never"}).fork_peers == 0


def test_new_runs_cap_weights_and_older_ones_keep_their_bound() -> None:
    assert run().weight_limit == 3.0 and run({"max_weight": 8}).weight_limit == 8.0
    assert run({"protocol": "gossip"}).max_weight is run({"robust": "krum"}).max_weight is None
    assert replace(run(), max_weight=None).weight_limit == 16.0


def test_new_runs_have_clusters_unless_a_setting_prevents_it() -> None:
    """Runs that say nothing were begun before there were any."""
    assert run().clusters and run({"voters": 8}).clusters and run({"recipe.overlap": "keep"}).clusters
    assert all(run({"robust": rule}).clusters for rule in RULES)
    for settings in ({"protocol": "moshpit"}, {"codec": "topk"}, {"stages": 2}):
        assert run(settings).clusters is None
    assert run({"clusters": False}).clusters is False


@pytest.mark.parametrize(
    "text, words",
    [
        ("[recipe]\ninner_step = 3", 'unknown key "inner_step" in [recipe]: did you mean "inner_steps"?'),
        ("protocl = 'butterfly'", 'unknown key "protocl": did you mean "protocol"?'),
        ("task = 'paced'\n[gpt]\nlayer = 3", 'unknown key "layer" in [gpt]: did you mean "layers"?'),
        ("rounds = 3", 'unknown key "rounds": write it as "recipe.rounds", or into the table [recipe]'),
        ("protocol = 'buterfly'", 'unknown protocol "buterfly": did you mean "butterfly"?'),
        ("task = 'gtp'", "\"task\": 'gtp' is not a task: gpt, paced, hf, loop, or your own as package.module:factory"),
        ("task = 3", '"task" must be a text, not 3'),
        ("task = 'a:b'\noptions = 3", '"options" must be a table, [options]'),
        ("task = 'a:b'\n[options]\nx = [1]", "[options]: x must be a text, a number, true or false"),
        ("task = 'a:b'\n[options]\n'x y' = 1", "[options]: 'x y' is not a valid option name"),
        ("task = 'a:b'\n[options]\nx = nan", "[options]: x must be a finite number"),
        (f"task = 'a:b'\n[options]\nx = {'9' * 30}", "[options]: x is a whole number of more than 63 bits"),
        (f"task = 'a:b'\n[options]\nx = '{'y' * 1025}'", "[options]: x has 1025 characters, more than 1024"),
        ("task = 'a:b'\n[options]\n" + "".join(f"x{n} = 1\n" for n in range(65)), "65 options, more than 64"),
        ("codec = 'int9'", "did you mean 'int8'?"),
        ("robust = 'centred-clip'", "did you mean 'centered_clip'?"),
        ("robust = 'krum'\ncodec = 'topk'", "topk sends mostly zeros, from which krum makes zeros: use another codec"),
        ("max_weight = 0.5", "max_weight"),
        ("max_weight = 17", "max_weight"),
        (
            "max_weight = 2\nprotocol = 'gossip'",
            "max_weight is for butterfly and moshpit and the robust rule mean: not",
        ),
        ("clusters = false\nvoters = 8", "voters is for runs with clusters: leave out voters, or clusters = false"),
        ("voters = 8\ncodec = 'topk'", "voters is for runs with clusters: not for codec topk"),
        ("clusters = true\nvoters = 2", "voters"),
        ("clusters = true\nprotocol = 'moshpit'", "clusters and protocol moshpit do not go together"),
        ("clusters = true\nstages = 2", "clusters and stages 2 do not go together"),
        ("clusters = true\ncodec = 'topk'", "clusters and codec topk do not go together"),
        ("max_weight = 2\nrobust = 'krum'", "not for robust krum, where no weight exceeds one"),
        ("robust = 'krum'\nprotocol = 'gossip'", "robust krum is for butterfly and moshpit: gossip takes no rule"),
        ("protocol = 'gossip'\nschedule = 'one_peer'", "did you mean 'one-peer-exponential'?"),
        ("schedule = 'ring'", "schedule ring is for gossip and push_sum: butterfly has none"),
        ("codec = 'topk'\nprotocol = 'gossip'", "codec topk is for protocol butterfly: gossip needs vectors whole"),
        ("codec = 'topk'\nchunk_elements = 5000", "with codec topk, chunk_elements must be a multiple of 4096"),
        ("protocol = 'gossip'\nfork = 'never'", "fork and min_peers are for butterfly: gossip has no votes"),
        ("data = 'x'", 'unknown key "data": write it as "peer.data", or into the table [peer]'),
        ("fork = 'no'", "\"fork\" must be 'allowed' or 'never', not 'no'"),
        ("name = 'a\tb'", "cannot be printed"),
        ("name = ''", '"name" must have at least 1 character'),
        (f"name = '{'x' * 65}'", '"name" must have at most 64 characters'),
        ("[gpt]\npreset = 'w1'", "no preset 'w1': one of w64"),
        ("recipe = 3", '"recipe" must be a table, [recipe]'),
        ("[recipe]\nrounds = 0", "[recipe]: rounds must be a whole number, at least 1, not 0"),
        ("[recipe]\ninner_steps = -5", "[recipe]: inner_steps must be a whole number, at least 1, not -5"),
        ("[recipe]\nouter_learning_rate = 0", "[recipe]: outer_learning_rate must be positive, not 0"),
        ("[recipe]\nlearning_rate = 'fast'", '"learning_rate" in [recipe] must be a number'),
        ("[recipe]\nweight_decay = -0.1", "[recipe]: weight_decay must be 0 or more, not -0.1"),
        ("[recipe]\nfinal_fraction = 1.1", "[recipe]: final_fraction must be in [0, 1], not 1.1"),
        ("[recipe]\nbetas = [0.9, 1.0]", "[recipe]: betas must be two numbers in [0, 1), not (0.9, 1.0)"),
        ("[gpt]\nlayers = 0", '"layers" in [gpt] must be at least 1'),
        ("[gpt]\ncontext = -1", '"context" in [gpt] must be at least 1'),
        ("[gpt]\nwidth = 16\nheads = 16", "16 heads do not divide width 16 into even parts"),
        ("[recipe]\nrounds = 10_000_001", "[recipe]: rounds must be at most 10000000, not 10000001"),
        ("[recipe]\nrounds = '5'", "\"rounds\" in [recipe] must be a whole number, not '5'"),
        ("[recipe]\nlearning_rate = nan", '"learning_rate" in [recipe] must be a finite number'),
        ("[recipe]\nbetas = [0.9, 0.95, 1]", '"betas" in [recipe] must have at most 2 items'),
        ("[recipe]\nbetas = [0.9]", '"betas" in [recipe] has too few items'),
        ("[recipe]\nouter_momentum = 1", "outer_momentum must be in [0, 1), not 1.0"),
        ("protocol = 'gossip'\n[recipe]\noverlap = 'keep'", "recipe.overlap is for butterfly, without stages: not for"),
        ("stages = 2\n[recipe]\noverlap = 'keep'", "without stages: not for a run with stages"),
        ("protocol = 'moshpit'\n[recipe]\nfragments = 4", "recipe.fragments is for butterfly, without stages: not for"),
        ("[recipe]\nfragments = 1", "fragments must be between 2 and 64, not 1"),
        ("[recipe]\noverlap = 'eager'", '"overlap" in [recipe] must be '),
        ("[recipe]\nouter_pull = 0.3", "outer_pull is for gossip, whose pairs pull each other: not for butterfly"),
        (
            "protocol = 'gossip'\n[recipe]\nouter_pull = 1",
            "above 0 and, with this momentum, below 1, not 1",
        ),
        ("protocol = 'gossip'\n[recipe]\nouter_pull = 0", "outer_pull must be above 0 and, with this"),
        ("protocol = 'gossip'\n[recipe]\nouter_pull = true", '"outer_pull" in [recipe] must be a number, not true'),
        ("min_peers = true", '"min_peers" must be a whole number, not true'),
        ("min_peers = 33", '"min_peers" must be at most 32'),
        ("spread_limit = 0", '"spread_limit" must be more than 0'),
        ("seed = -1", '"seed" must be at least 0'),
        (f"seed = {'9' * 400}", '"seed" must be less than 9223372036854775808, not a number of many digits'),
        ("chunk_elements = 1", '"chunk_elements" must be at least 1024'),
        ("[gpt]\nheads = 3", "[gpt]: 3 heads do not divide width 128"),
        ("[gpt]\nwidth = 16384\nlayers = 12", "[gpt]: the model has 38676086784 parameters, more"),
        ("[gpt]\nrows = 4096\ncontext = 16384", "[gpt]: rows times context are 67108864, more than 1048576"),
        (f"task = 'paced'\n[paced]\nelements = {MAX_ELEMENTS + 1}", '"elements" in [paced] must be at most'),
        ("seed = ", "not valid TOML"),
        ('"a\\u001b\\n" = 3', 'unknown key "a\\x1b\\n"'),
        ("x = " + "[" * 10_000, "not valid TOML"),
        ("#" * (MAX_BYTES + 1), "longer than 64 KiB"),
    ],
)
def test_error_in_run_file_gives_one_line(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    line = refusal(file)
    assert line.startswith(f"{file}: ") and words in line


def test_unreadable_run_file_gives_one_line_error(file: Path) -> None:
    assert refusal(file) == f"{file}: No such file or directory: give the path of a run file"
    assert "Is a directory" in refusal(file.parent)
    file.write_bytes(b"name = '\xff'")
    assert "not text in UTF-8" in refusal(file)
    file.write_bytes("name = 'x'".encode("utf-16-le"))
    assert "UTF-16 without a byte-order mark has: save it as UTF-8" in refusal(file)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_run_file_with_a_byte_order_mark_is_read(file: Path, encoding: str) -> None:
    file.write_bytes("name = 'grün'\r\n".encode(encoding))
    assert load_run(file, {}, PROTOCOLS).name == "grün"


def test_bad_flag_is_not_blamed_on_the_file(file: Path) -> None:
    file.write_text("seed = 3")
    assert refusal(file, {"recipe.rounds": 0}).startswith("command line: [recipe]: rounds must be")
    assert refusal(file, {"recipe.round": 3}) == (
        'command line: unknown key "round" in [recipe]: did you mean "rounds"?'
    )
    assert refusal(file, {"protocol": "x"}).startswith('command line: unknown protocol "x": there are butterfly')
    assert refusal(file, {"gpt.preset": "x"}).startswith("command line: no preset")
    assert refusal(None, {"recipe": 3}).startswith("command line: ")
    assert refusal(None, {"recipe": 3, "recipe.rounds": 3}).startswith('command line: "recipe" cannot be both')
    assert refusal(None, {"a.b.c": 3}).startswith('command line: unknown key "a.b"')


def test_canonical_bytes_ignore_number_spelling() -> None:
    whole = run({"recipe.learning_rate": 1})
    assert canonical(whole) == canonical(run({"recipe.learning_rate": 1.0}))
    config = RunConfig(recipe=replace(whole.recipe, weight_decay=0), gpt=whole.gpt)
    assert _parse(canonical(config)) == config


@given(
    st.fixed_dictionaries(
        {
            "learning_rate": st.floats(1e-300, 1000),
            "weight_decay": st.floats(0, 1000),
            "betas": st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
            "warmup_steps": st.integers(0, 10**9),
        }
    ),
    st.integers(0, 2**63 - 1),
    st.sampled_from(["default", "Zürich 🐦"]),
    st.sampled_from(["gpt", "paced"]),
)
def test_every_config_has_one_canonical_form(values: dict[str, object], seed: int, name: str, task: str) -> None:
    recipe = {f"recipe.{key}": value for key, value in values.items()}
    config = run({"seed": seed, "name": name, "task": task} | recipe)
    again = _parse(canonical(config))
    assert again == config and canonical(again) == canonical(config) and canonical(again).isascii()


def spelt(change: Mapping[str, object]) -> bytes:
    return json.dumps(json.loads(canonical(run())) | change).encode()


@pytest.mark.parametrize(
    "data, words",
    [
        (spelt({"extra": 1}), 'unknown key "extra"'),
        (spelt({"task": "paced"}), "no other task's"),
        (spelt({"task": "os:system"}), "no other task's"),
        (spelt({"options": {}}), "no other task's"),
        (spelt({"task": "a:b", "gpt": None, "options": {"x": [[1]]}}), "x must be a text"),
        (spelt({"gpt": {"preset": "w64"}}), "is missing"),
        (spelt({"seed": 1.5}), "whole number"),
        (spelt({"spread_limit": float("nan")}), "finite"),
        (b"{}", '"recipe" is missing'),
        (b"[" * 60_000, "recursion limit"),
    ],
)
def test_foreign_bytes_give_one_line_error(data: bytes, words: str) -> None:
    assert words in one_line(ConfigError, _parse, data)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        _parse(data)


def test_run_of_unknown_protocol_is_rejected() -> None:
    config = load_run(None, {"protocol": "moshpit"}, PROTOCOLS)
    config.require_protocol(PROTOCOLS)
    with pytest.raises(ConfigError, match='unknown protocol "moshpit": there are butterfly'):
        config.require_protocol(["butterfly"])


def test_stages_split_a_presets_step_into_microbatches() -> None:
    """The tokens of a step stay; one stage is the same run as none; values that the user gives are kept."""
    whole, cut = run(), run({"stages": 3})
    assert (whole.gpt.rows, whole.recipe.batches) == (8, 1) and (cut.gpt.rows, cut.recipe.batches) == (1, 8)  # type: ignore[union-attr]
    assert replace(cut, stages=1, clusters=True, gpt=whole.gpt, recipe=whole.recipe) == whole
    assert canonical(run({"stages": 1})) == canonical(whole) and b"lookahead" not in canonical(cut)
    given = run({"stages": 2, "gpt.rows": 4})
    assert (given.gpt.rows, given.recipe.batches) == (4, 1)  # type: ignore[union-attr]
    assert run({"stages": 2, "recipe.batches": 3}).gpt.rows == 8  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "codecs"),
    [
        ({}, ("bf16", "bf16")),
        ({"activations": "int8"}, ("int8", "int8")),
        ({"gradients": "fp32"}, ("bf16", "fp32")),
    ],
)
def test_codecs_of_stages_are_in_the_manifest_if_given(given: dict[str, object], codecs: tuple[str, str]) -> None:
    """A run without them has the id that it had before there were any."""
    cut = run({"stages": 3} | given)
    assert (cut.activation_codec, cut.gradient_codec) == codecs and _parse(canonical(cut)) == cut
    assert [name for name in ("activations", "gradients") if name.encode() in canonical(cut)] == [*given]


WIDE = {"recipe.batches": 64, "gpt.rows": 128, "gpt.width": 256}
"""As many microbatches as a replica may hold, with activations as large as may be."""


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"stages": 7}, "7 stages need as many blocks, and the model has 6: take fewer stages"),
        ({"stages": 33}, "must be at most 32, not 33"),
        ({"stages": 2, "protocol": "gossip"}, "stages average by butterfly, not by gossip"),
        ({"stages": 2, "task": "somebodys:own"}, "stages is for the tasks gpt and paced: somebodys:own cannot be cut"),
        ({"stages": 2, "codec": "topk"}, "stages and codec topk do not go together"),
        ({"stages": 2, "recipe.batches": 65}, "recipe.batches must be at most 64, not 65"),
        ({"stages": 2, "gpt.rows": 512, "gpt.width": 256}, "activations of 64 MiB, more than 16: take fewer gpt.rows"),
        ({"stages": 2, "activations": "int4"}, "must be one of bf16, fp32, int8"),
        ({"gradients": "fp32"}, "gradients is for runs with stages"),
        ({"activations": "fp32"}, "activations is for runs with stages"),
        ({"rebalance": True}, "rebalance is for runs with stages: give stages, too, or leave it out"),
        ({"recipe.lookahead": 8}, "recipe.lookahead is for runs with stages: give stages, too, or leave it out"),
        ({"stages": 2, "recipe.lookahead": -1}, "lookahead must be between 0 and 64, not -1"),
        ({"stages": 2, **WIDE, "recipe.lookahead": 1}, "65 microbatches would take 1040 MiB"),
        ({"stages": 3, "task": "paced", "paced.elements": 2}, "2 elements cannot be cut into 3 stages"),
    ],
)
def test_impossible_stages_are_refused(overrides: dict[str, object], line: str) -> None:
    assert line in refusal(None, overrides)
