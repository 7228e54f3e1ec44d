"""The run file, flags and environment: what wins over what, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.peer_config import KEYS, PeerConfig, load_peer, variables
from node.config.run_config import MAX_ELEMENTS, GptTable, RunConfig, load_run
from node.config.toml import MAX_BYTES, ConfigError
from node.tasks.base import Recipe, flatten
from node.tasks.gpt import PRESETS, Gpt
from node.tasks.paced import Paced

PROTOCOLS = ("butterfly", "moshpit", "gossip")
PEER = "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5"
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.toml"


def run(overrides: Mapping[str, object] | None = None) -> RunConfig:
    return load_run(None, overrides or {}, PROTOCOLS)


def refusal(file: Path | None, overrides: Mapping[str, object] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run(file, overrides or {}, PROTOCOLS)
    line = str(caught.value)
    assert len(line.splitlines()) == 1 and line.isprintable()
    return line


def peer_refusal(
    flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> str:
    with pytest.raises(ConfigError) as caught:
        load_peer(flags or {}, environment or {}, file)
    line = str(caught.value)
    assert len(line.splitlines()) == 1
    return line


def test_default_config_is_the_default_preset() -> None:
    config = run()
    assert (config.task, config.protocol, config.codec) == ("gpt", "butterfly", "int8")
    assert config.preset() == PRESETS["w128"]
    assert config.fork_peers == 1


def test_robust_mean_equals_no_robust_rule() -> None:
    assert run({"robust": "mean"}).robust is None and run({"robust": "mean"}).to_canonical() == run().to_canonical()
    config = run({"robust": "krum"})
    assert config.robust == "krum" and RunConfig.from_canonical(config.to_canonical()) == config


def test_random_schedule_is_the_default() -> None:
    gossip = run({"protocol": "gossip"})
    assert run({"protocol": "gossip", "schedule": "random"}).to_canonical() == gossip.to_canonical()
    config = run({"protocol": "gossip", "schedule": "ring"})
    assert config.schedule == "ring" and RunConfig.from_canonical(config.to_canonical()) == config


def test_missing_pull_averages_states() -> None:
    gossip = run({"protocol": "gossip"})
    assert gossip.recipe.outer_pull is None and b"pull" not in gossip.to_canonical()
    config = run({"protocol": "gossip", "recipe.outer_pull": 0.3})
    assert config.recipe.outer_pull == 0.3 and RunConfig.from_canonical(config.to_canonical()) == config


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_stored_by_its_values(name: str) -> None:
    config = run({"gpt.preset": name})
    assert config.preset() == PRESETS[name]
    assert name.encode() not in config.to_canonical()


def test_flags_override_file_and_file_overrides_preset(file: Path) -> None:
    file.write_text('name = "mine"\n[recipe]\nrounds = 3\ninner_steps = 7\n[gpt]\npreset = "w64"\nwidth = 32\n')
    config = load_run(file, {"recipe.rounds": 5, "gpt.rows": 2, "name": None}, PROTOCOLS)
    assert config.name == "mine"
    assert (config.recipe.rounds, config.recipe.inner_steps) == (5, 7)
    assert config.recipe.learning_rate == PRESETS["w64"].recipe.learning_rate
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
    assert config.recipe == replace(PRESETS["w128"].recipe, rounds=5)
    again = RunConfig.from_canonical(config.to_canonical())
    assert again == config and again.options is not None and isinstance(again.options["rate"], float)
    assert run({"task": "mine:make"}).options == {} and run().own_task == ""


@pytest.mark.parametrize("name", ["mine:make", "a.b_c.D1:_e", f"{'a' * 62}:{'b' * 65}"])
def test_valid_own_task_names_are_accepted(name: str) -> None:
    assert run({"task": name}).own_task == name


@pytest.mark.parametrize(
    "name",
    [
        "mine",
        "mine:",
        ":make",
        "a..b:c",
        ".a:b",
        "a:b.c",
        "1a:b",
        "a-b:c",
        "a:b\n",
        "ä:b",
        "a: b",
        "a;b:c",
        f"{'a' * 64}:{'b' * 64}",
    ],
)
def test_invalid_task_name_is_rejected(name: str) -> None:
    assert "is no task: gpt, paced, or your own as package.module:factory" in refusal(None, {"task": name})


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


@pytest.mark.parametrize(
    "text, words",
    [
        ("[recipe]\ninner_step = 3", 'unknown key "inner_step" in [recipe]: did you mean "inner_steps"?'),
        ("protocl = 'butterfly'", 'unknown key "protocl": did you mean "protocol"?'),
        ("task = 'paced'\n[gpt]\nlayer = 3", 'unknown key "layer" in [gpt]: did you mean "layers"?'),
        ("rounds = 3", 'unknown key "rounds": write it as "recipe.rounds", or into the table [recipe]'),
        ("protocol = 'buterfly'", 'unknown protocol "buterfly": did you mean "butterfly"?'),
        ("task = 'gtp'", "\"task\": 'gtp' is no task: gpt, paced, or your own as package.module:factory"),
        ("task = 3", '"task" must be a text, not 3'),
        ("task = 'a.b:c:d'", "'a.b:c:d' is no task"),
        ("task = 'a:b'\noptions = 3", '"options" must be a table, [options]'),
        ("task = 'a:b'\n[options]\nx = [1]", "[options]: x must be a text, a number, true or false"),
        ("task = 'a:b'\n[options]\n'x y' = 1", "[options]: 'x y' is not a valid option name"),
        ("task = 'a:b'\n[options]\nx = nan", "[options]: x must be a finite number"),
        (f"task = 'a:b'\n[options]\nx = {'9' * 30}", "[options]: x is a whole number of more than 63 bits"),
        (f"task = 'a:b'\n[options]\nx = '{'y' * 1025}'", "[options]: x has 1025 characters, more than 1024"),
        ("task = 'a:b'\n[options]\n" + "".join(f"x{n} = 1\n" for n in range(65)), "65 options, more than 64"),
        ("codec = 'int9'", "did you mean 'int8'?"),
        ("robust = 'centred-clip'", "unknown robust rule 'centred-clip': there are mean, centered_clip, trimmed_mean,"),
        ("robust = 'centred-clip'", "did you mean 'centered_clip'?"),
        ("robust = 'krum'\ncodec = 'topk'", "topk sends mostly zeros, from which krum makes zeros: use another codec"),
        ("robust = 'krum'\nprotocol = 'gossip'", "robust krum is for butterfly and moshpit: gossip takes no rule"),
        ("protocol = 'gossip'\nschedule = 'torus'", "unknown schedule 'torus': there are random, ring, exponential,"),
        ("protocol = 'gossip'\nschedule = 'one_peer'", "did you mean 'one-peer-exponential'?"),
        ("schedule = 'ring'", "schedule ring is for gossip and push_sum: butterfly has none"),
        ("codec = 'topk'\nprotocol = 'gossip'", "codec topk is for protocol butterfly: gossip needs vectors whole"),
        ("codec = 'topk'\nchunk_elements = 5000", "with codec topk, chunk_elements must be a multiple of 4096"),
        ("protocol = 'gossip'\nfork = 'never'", "fork and min_peers are for butterfly: gossip has no votes"),
        ("protocol = 'moshpit'\nmin_peers = 2", "fork and min_peers are for butterfly: moshpit has no votes"),
        ("data = 'x'", 'unknown key "data": write it as "peer.data", or into the table [peer]'),
        ("nickname = 'x'", 'unknown key "nickname": write it as "peer.nickname", or into the table [peer]'),
        ("fork = 'no'", "\"fork\" must be 'allowed' or 'never', not 'no'"),
        ("name = 'a\tb'", "cannot be printed"),
        ("name = ''", '"name" must have at least 1 character'),
        (f"name = '{'x' * 65}'", '"name" must have at most 64 characters'),
        ("[gpt]\npreset = 'w1'", "no preset 'w1': one of w64"),
        ("recipe = 3", '"recipe" must be a table, [recipe]'),
        ("[recipe]\nrounds = 0", "[recipe]: rounds must be a whole number, at least 1, not 0"),
        ("[recipe]\nrounds = 10_000_001", "[recipe]: rounds must be at most 10000000, not 10000001"),
        ("[recipe]\nrounds = '5'", "\"rounds\" in [recipe] must be a whole number, not '5'"),
        ("[recipe]\nlearning_rate = nan", '"learning_rate" in [recipe] must be a finite number'),
        ("[recipe]\nbetas = [0.9, 0.95, 1]", '"betas" in [recipe] must have at most 2 items'),
        ("[recipe]\nbetas = [0.9]", '"betas" in [recipe] has too few items'),
        ("[recipe]\nbetas = 1", '"betas" in [recipe] must be a list, not 1'),
        ("codec = 1979-05-27", "unknown codec '1979-05-27'"),
        ("[recipe]\nouter_momentum = 1", "outer_momentum must be in [0, 1), not 1.0"),
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
        ("seed = 1979-05-27", '"seed" must be a whole number'),
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


def test_config_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        run().seed = 3  # type: ignore[misc]


def test_canonical_bytes_round_trip() -> None:
    for config in (run(), run({"task": "paced"}), run({"name": "Zürich 🐦", "seed": 2**63 - 1})):
        assert config.to_canonical().isascii()
        assert RunConfig.from_canonical(config.to_canonical()) == config


def test_canonical_bytes_ignore_number_spelling() -> None:
    whole = run({"recipe.learning_rate": 1})
    assert whole.to_canonical() == run({"recipe.learning_rate": 1.0}).to_canonical()
    config = RunConfig(recipe=replace(whole.recipe, weight_decay=0), gpt=whole.gpt)
    assert RunConfig.from_canonical(config.to_canonical()) == config


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
)
def test_every_config_has_one_canonical_form(values: dict[str, object], seed: int) -> None:
    config = run({"seed": seed} | {f"recipe.{name}": value for name, value in values.items()})
    again = RunConfig.from_canonical(config.to_canonical())
    assert again == config and again.to_canonical() == config.to_canonical()


def spelt(change: Mapping[str, object], **options: object) -> bytes:
    tree = json.loads(run().to_canonical()) | change
    return json.dumps(tree, **({"sort_keys": True, "separators": (",", ":")} | options)).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data, words",
    [
        (spelt({"extra": 1}), 'unknown key "extra"'),
        (spelt({"paced": None}), "canonical spelling"),
        (spelt({"spread_limit": 1}), "canonical spelling"),
        (spelt({}, separators=(", ", ":")), "canonical spelling"),
        (spelt({"name": "é"}, ensure_ascii=False), "canonical spelling"),
        (spelt({})[:-1] + b',"task":"gpt"}', "canonical spelling"),
        (spelt({"task": "paced"}), "no other task's"),
        (spelt({"task": "os:system"}), "no other task's"),
        (spelt({"options": {}}), "no other task's"),
        (spelt({"task": "a:b", "gpt": None, "options": {"x": [[1]]}}), "x must be a text"),
        (spelt({"gpt": {"preset": "w64"}}), "is missing"),
        (spelt({"seed": 1.5}), "whole number"),
        (spelt({"spread_limit": float("nan")}), "finite"),
        (b"{}", '"recipe" is missing'),
        (b"[" * 60_000, "recursion limit"),
        (b" " * (MAX_BYTES + 1), "65537 bytes"),
    ],
)
def test_foreign_bytes_give_one_line_error(data: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_canonical(data)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_config_error(data: bytes) -> None:
    with pytest.raises(ConfigError):
        RunConfig.from_canonical(data)


def test_run_of_unknown_protocol_is_rejected() -> None:
    config = load_run(None, {"protocol": "moshpit"}, PROTOCOLS)
    config.require_protocol(PROTOCOLS)
    with pytest.raises(ConfigError, match='unknown protocol "moshpit": there are butterfly'):
        config.require_protocol(["butterfly"])


def test_every_recipe_value_can_be_set() -> None:
    values = {field.name: getattr(PRESETS["w64"].recipe, field.name) for field in fields(Recipe)}
    assert run({f"recipe.{name}": value for name, value in values.items()}).recipe == PRESETS["w64"].recipe


# --- this machine -----------------------------------------------------------------------------------------------------


def test_flags_override_environment_then_file_then_defaults(file: Path) -> None:
    file.write_text("[peer]\nnickname = 'file'\nthreads = 2\ndevice = 'cuda'\n")
    environment = {"NODE_THREADS": "3", "NODE_DEVICE": "cpu", "PATH": "/bin"}
    config = load_peer({"device": "mps", "rounds": None}, environment, file)
    assert (config.device, config.threads, config.nickname, config.rounds) == ("mps", 3, "file", None)
    assert config.origins["device"] == "flag --device"
    assert config.origins["threads"] == "NODE_THREADS"
    assert config.origins["nickname"] == f"{file} [peer]"
    assert config.origins["rounds"] == "default"
    assert set(config.origins) == set(KEYS)


@pytest.mark.parametrize("line", [f"bootstrap = ['{ADDRESS}']", "run_id = '0123456789ab'"])
def test_run_file_cannot_name_a_run_to_join(file: Path, line: str) -> None:
    file.write_text(f"[peer]\n{line}\n")
    flag = "--" + line.split()[0].replace("_", "-")
    with pytest.raises(ConfigError, match=f"to join one, give {flag} instead"):
        load_peer({}, {}, file)


def test_default_peer_listens_on_all_interfaces() -> None:
    config = load_peer({}, {}, None)
    assert config.listen == ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0")
    assert replace(config, origins={}) == PeerConfig()


def test_environment_values_are_parsed_from_strings() -> None:
    config = load_peer(
        {},
        {
            "NODE_BOOTSTRAP": f"{ADDRESS}, /dns4/example.org/tcp/1/p2p/{PEER},@~/addresses",
            "NODE_NAT": "0",
            "NODE_JSON": "true",
            "NODE_ROUNDS": "7",
            "NODE_BANDWIDTH_BYTES_PER_SECOND": "1e6",
            "NODE_RUN_ID": "ABCDEF012345",
            "NODE_DATA": "~/text",
            "NODE_NICKNAME": "",
        },
        None,
    )
    assert config.bootstrap == (ADDRESS, f"/dns4/example.org/tcp/1/p2p/{PEER}", f"@{Path.home()}/addresses")
    assert (config.nat, config.json, config.rounds, config.bandwidth_bytes_per_second) == (False, True, 7, 1e6)
    assert config.run_id == "abcdef012345"
    assert config.data == Path.home() / "text"
    assert config.origins["nickname"] == "default"


def test_unrelated_node_variables_are_ignored() -> None:
    assert load_peer({}, {"NODE_ENV": "production", "NODE_OPTIONS": "x", "NODE_RANK": "0"}, None).device == "auto"


@pytest.mark.parametrize(
    "address, words",
    [
        ("example.org:4001", "not a multiaddr: write /dns/example.org/tcp/4001/p2p/<its peer id>"),
        (f"tcp://192.0.2.7:80/p2p/{PEER}", f"write /ip4/192.0.2.7/tcp/80/p2p/{PEER}"),
        ("[2001:db8::1]:80", "write /ip6/2001:db8::1/tcp/80/p2p/"),
        (PEER, "not a multiaddr: give one like /ip4/"),
        ("/ip4/192.0.2.7/tcp/80", "does not say which peer it is: it must end in /p2p/<its peer id>"),
        (f"/p2p/{PEER}", "does not say where the peer is"),
        (f"/ip4/0.0.0.0/tcp/80/p2p/{PEER}", "no peer can be reached at"),
        (f"/ip4/192.0.2.7/tcp/0/p2p/{PEER}", "no peer can be reached at"),
        (f"/ip4/192.0.2.7/tcp/99999/p2p/{PEER}", "not in range"),
        (f"/ip4/999.0.2.7/tcp/80/p2p/{PEER}", "is not IPv4"),
        ("/ip4/192.0.2.7/tcp/80/p2p/12D3Koo…", "Invalid CID"),
        ("/", "is empty"),
        ("@", "'@' names no file: write @ and the path of a file that holds addresses"),
        ("@/tmp", "'@/tmp' names no file"),
        (__file__, f"is a file: to have addresses read from it, write @{__file__}"),
    ],
)
def test_bad_bootstrap_address_error_suggests_the_form(address: str, words: str) -> None:
    line = peer_refusal({"bootstrap": (ADDRESS, address)})
    assert line.startswith("flag --bootstrap: ") and words in line


@given(st.text() | st.text().map("/".__add__) | st.text().map(f"/ip4/192.0.2.7/tcp/1/p2p/{PEER}".__add__))
def test_any_address_is_accepted_or_gives_one_line(address: str) -> None:
    for key in ("bootstrap", "listen", "announce"):
        try:
            load_peer({key: (address,)}, {}, None)
        except ConfigError as error:
            assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("listen", (), "must have at least 1 item"),
        ("listen", (ADDRESS,), "names a peer: listen on the part before /p2p/"),
        ("announce", ("/ip4/192.0.2.7/tcp/0",), "announce a public address and a fixed port"),
        ("announce", ("/ip4/0.0.0.0/tcp/80",), "announce a public address and a fixed port"),
        ("announce", (ADDRESS,), "names a peer: announce the part before /p2p/"),
        ("announce", ("/dns4/founder",), "has no port: write /dns4/founder/tcp/<the port that others dial>"),
        ("announce", ("/dns4/my_founder/tcp/1",), "Invalid domain name: '_' at position 3 of 'my_founder'"),
        ("announce", ("/dns4/192.0.2.7/tcp/1",), "192.0.2.7 is an address and no name: write /ip4/"),
        ("announce", ("/dns4/bücher.example/tcp/1",), "write the one that begins with xn--"),
        ("announce", (f"/dns4/{'.'.join(['a' * 49] * 5)}/tcp/1",), "is longer than 256 characters"),
        ("announce", ("founder:4001",), "is not a multiaddr: write /dns/founder/tcp/4001"),
        ("announce", ("/dns4/founder/tcp/7",), "on any free one: also give --listen /ip4/0.0.0.0/tcp/7"),
        ("run_id", "abc", "64 hex digits, or at least the first 12 of them"),
        ("nickname", "x" * 33, "at most 32 printable characters"),
        ("nickname", "a\nb", "at most 32 printable characters"),
        ("device", "gpu", "must be 'auto', 'cpu', 'cuda' or 'mps', not 'gpu'"),
        ("threads", "many", 'must be "auto" or a whole number'),
        ("threads", 0, 'must be "auto" or a whole number'),
        ("precision", "fp8", "must be 'auto', 'float32' or 'bfloat16'"),
        ("rounds", 0, "must be at least 1, not 0"),
        ("wait_for_peers", 33, "must be at most 32"),
        ("bandwidth_bytes_per_second", float("inf"), "must be"),
        ("log_level", "loud", "must be 'debug', 'info'"),
        ("data", Path("~nobody-of-that-name/text"), "no such home directory"),
        ("nat", "maybe", "must be true or false, not 'maybe'"),
    ],
)
def test_bad_value_error_names_its_flag(key: str, value: object, words: str) -> None:
    line = peer_refusal({key: value})
    assert line.startswith(f"flag --{key.replace('_', '-')}: ") and words in line


@pytest.mark.parametrize("key", ["listen", "announce"])
def test_suggested_listen_address_is_itself_valid(key: str) -> None:
    for address in ("x", "192.0.2.9:4001", "/ip4/192.0.2.300/tcp/1"):
        suggested = peer_refusal({key: (address,)}).split()[-1]
        fixed = {"listen": (suggested,)}
        assert getattr(load_peer(fixed | {key: (suggested,)}, {}, None), key) == (suggested,)


@pytest.mark.parametrize("kind", ["dns", "dns4", "dns6"])
def test_dns_names_can_be_announced_and_dialled(kind: str) -> None:
    where = f"/{kind}/founder/tcp/4001"
    config = load_peer(
        {"announce": (where,), "bootstrap": (f"{where}/p2p/{PEER}",)}, {"NODE_LISTEN": "/ip4/0.0.0.0/tcp/4001"}, None
    )
    assert (config.announce, config.bootstrap) == ((where,), (f"{where}/p2p/{PEER}",))


def test_machine_settings_in_file_become_environment_variables(file: Path) -> None:
    file.write_text("[peer]\ndata = '~/text'\nbandwidth_bytes_per_second = 2.5e6\ndevice = 'cpu'\nnickname = 'ada'\n")
    said = variables(file, {"NODE_DEVICE": "auto", "NODE_DATA": ""})
    assert said == {"NODE_DATA": "~/text", "NODE_BANDWIDTH_BYTES_PER_SECOND": "2500000.0"}, "no peer's own name"
    config = load_peer({}, said, None)
    assert config.data == Path("~/text").expanduser() and config.bandwidth_bytes_per_second == 2.5e6


def test_bad_value_error_names_its_source(file: Path) -> None:
    assert peer_refusal({}, {"NODE_DEVICE": "gpu"}).startswith("NODE_DEVICE: must be 'auto'")
    file.write_text("[peer]\ndevice = 'gpu'\n")
    assert peer_refusal(file=file).startswith(f"{file} [peer]: \"device\" must be 'auto'")
    file.write_text("[peer]\nlisten = 3\n")
    assert peer_refusal(file=file) == f'{file} [peer]: "listen" must be a list, not 3'
    for value, words in (
        ("data = 5", '"data" must be a path, not 5'),
        ("state_dir = [1]", '"state_dir" must be a path, not a list'),
        ("rounds = 1e300", '"rounds" must be a whole number, not 1e+300'),
        ("threads = {a = 1}", '[threads]: a table must be "auto" or a whole number from 1 to 999'),
        ("nat = 07:32:00", '"nat" must be true or false, not the date or time 07:32:00'),
    ):
        file.write_text(f"[peer]\n{value}\n")
        assert peer_refusal(file=file) == f"{file} [peer]: {words}"
    file.write_text("peer = 3")
    assert peer_refusal(file=file) == f'{file}: "peer" must be a table, [peer]'


def test_misspelt_key_is_an_error_in_any_source(file: Path) -> None:
    assert peer_refusal({}, {"NODE_LISTN": "x"}) == 'unknown variable "NODE_LISTN": did you mean "NODE_LISTEN"?'
    assert peer_refusal({}, {"NODE_BANDWIDTH": "1"}).endswith('did you mean "NODE_BANDWIDTH_BYTES_PER_SECOND"?')
    assert ": there are NODE_BOOTSTRAP, NODE_RUN_ID, " in peer_refusal({}, {"NODE_XYZZY": "1"}), "none is near"
    assert peer_refusal({"listn": "x"}) == 'unknown key "listn": did you mean "listen"?'
    file.write_text("[peer]\norigin = 'x'\n")
    assert peer_refusal(file=file).startswith(f'{file}: unknown key "origin" in [peer]')
