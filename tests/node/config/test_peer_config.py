"""A peer's configuration from flags, environment and file: which source wins, what is refused, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.config.peer_config import SETTINGS, PeerConfig, option_name
from node.config.peer_sources import load_peer, variables
from node.config.run_config import load_run
from node.config.sizes import in_unit
from node.config.toml import ConfigError
from tests.support.refusals import one_line

PEER = "12D3KooWGC6TvWhfapngX6wvJHMYvKpDMXPb3ZnCZ6dMoaMtimQ5"
ADDRESS = f"/ip4/192.0.2.7/tcp/31337/p2p/{PEER}"


def peer_refusal(
    flags: Mapping[str, object] | None = None, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> str:
    return one_line(ConfigError, load_peer, flags or {}, environment or {}, file)


def test_flags_override_environment_then_file_then_defaults(file: Path) -> None:
    file.write_text("[peer]\nnickname = 'file'\nthreads = 2\ndevice = 'cuda'\n")
    environment = {"NODE_THREADS": "3", "NODE_DEVICE": "cpu", "PATH": "/bin"}
    config = load_peer({"device": "mps", "rounds": None}, environment, file)
    assert (config.device, config.threads, config.nickname, config.rounds) == ("mps", 3, "file", None)
    assert config.origins["device"] == "flag --device"
    assert config.origins["threads"] == "NODE_THREADS"
    assert config.origins["nickname"] == f"{file} [peer]"
    assert config.origins["rounds"] == "default"
    assert set(config.origins) == set(SETTINGS)


@pytest.mark.parametrize("line", [f"bootstrap = ['{ADDRESS}']", "run_id = '0123456789ab'"])
def test_run_file_cannot_name_a_run_to_join(file: Path, line: str) -> None:
    file.write_text(f"[peer]\n{line}\n")
    flag = "--" + line.split()[0].replace("_", "-")
    with pytest.raises(ConfigError, match=f"to join one, give {flag} instead"):
        load_peer({}, {}, file)


def test_default_peer_listens_on_all_interfaces() -> None:
    """Variables of other programs change nothing."""
    config = load_peer({}, {"NODE_ENV": "production", "NODE_OPTIONS": "x", "NODE_RANK": "0"}, None)
    assert config.listen == ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0") and config.device == "auto"
    assert replace(config, origins={}) == PeerConfig() == replace(load_peer({}, {}, None), origins={})


def test_environment_values_are_parsed_from_strings() -> None:
    environment = {
        "NODE_BOOTSTRAP": f"{ADDRESS}, /dns4/example.org/tcp/1/p2p/{PEER},@~/addresses",
        "NODE_NAT": "0",
        "NODE_JSON": "true",
        "NODE_ROUNDS": "7",
        "NODE_BANDWIDTH_BYTES_PER_SECOND": "1e6",
        "NODE_RUN_ID": "ABCDEF012345",
        "NODE_LISTEN": "/ip4/0.0.0.0/tcp/4001",
        "NODE_ANNOUNCE": "/dns/founder/tcp/4001",
        "NODE_DATA": "~/text",
        "NODE_NICKNAME": "",
    }
    config = load_peer({}, environment, None)
    assert config.bootstrap == (ADDRESS, f"/dns4/example.org/tcp/1/p2p/{PEER}", f"@{Path.home()}/addresses")
    assert (config.nat, config.json, config.rounds, config.bandwidth_bytes_per_second) == (False, True, 7, 1e6)
    assert (config.run_id, config.data) == ("abcdef012345", Path.home() / "text")
    assert (config.listen, config.announce) == (("/ip4/0.0.0.0/tcp/4001",), ("/dns/founder/tcp/4001",))
    assert config.origins["nickname"] == "default"


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
        ("announce", ("/dns4/192.0.2.7/tcp/1",), "192.0.2.7 is an IP address; use /ip4/"),
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
        ("devices", "cpu,gpu1", "'gpu1' is not the name of a device"),
        ("devices", "cpu,cuda:0", "all of one kind, not cpu and cuda"),
        ("devices", "mps,mps", "mps is one device"),
        ("devices", "cuda,cuda", "several GPUs need their numbers"),
        ("devices", ",".join(["cpu"] * 65), "at most 64 devices, not 65"),
        ("ranks", 65, "at most 64"),
        ("precision", "fp8", "must be 'auto', 'float32', 'bfloat16' or 'float16'"),
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
    assert line.startswith(f"flag {option_name(key)}: ") and words in line


@pytest.mark.parametrize("key", ["listen", "announce"])
def test_suggested_listen_address_is_itself_valid(key: str) -> None:
    for address in ("x", "192.0.2.9:4001", "/ip4/192.0.2.300/tcp/1"):
        suggested = peer_refusal({key: (address,)}).split()[-1]
        fixed = {"listen": (suggested,)}
        assert getattr(load_peer(fixed | {key: (suggested,)}, {}, None), key) == (suggested,)


def test_machine_settings_in_file_become_environment_variables(file: Path) -> None:
    lists = 'bandwidth_bytes_per_second = 2.5e6\nhours = ["mon-fri 18:00-08:00", "sat,sun"]\nquota = "50GB/month"\n'
    file.write_text(f"[peer]\ndata = '~/text'\ndevice = 'cpu'\nnickname = 'ada'\n{lists}")
    environment = variables(file, {"NODE_DEVICE": "auto", "NODE_DATA": ""})
    names = {"NODE_DATA", "NODE_BANDWIDTH_BYTES_PER_SECOND", "NODE_HOURS", "NODE_QUOTA"}
    assert environment.keys() == names, "the nickname is one peer's own"
    through, alone = load_peer({}, environment, None), load_peer({}, {}, file)
    assert (through.hours, through.quota) == (alone.hours, alone.quota) and len(alone.hours) == 2 and alone.quota
    assert through.data == alone.data == Path.home() / "text" and through.bandwidth_bytes_per_second == 2.5e6


@pytest.mark.parametrize("quoted", [f'"{ADDRESS}"', f"'{ADDRESS}'\r", f'"{ADDRESS}","{ADDRESS}"'])
def test_variable_in_quotes_is_refused_by_name(quoted: str) -> None:
    """`docker --env-file` keeps quotes, and the ends of lines that Windows writes."""
    assert peer_refusal({}, {"NODE_BOOTSTRAP": quoted}).startswith("NODE_BOOTSTRAP: its value is in quotes")
    assert "NODE_BOOTSTRAP begins with a byte-order mark" in peer_refusal({}, {"\ufeffNODE_BOOTSTRAP": ADDRESS})
    assert load_peer({}, {"NODE_BOOTSTRAP": f" {ADDRESS} \r"}, None).bootstrap == (ADDRESS,)


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
    assert ": there are NODE_BOOTSTRAP, NODE_RUN_ID, " in peer_refusal({}, {"NODE_XYZZY": "1"}), "no name is similar"
    assert peer_refusal({"listn": "x"}) == 'unknown key "listn": did you mean "listen"?'
    file.write_text("[peer]\norigin = 'x'\n")
    assert peer_refusal(file=file).startswith(f'{file}: unknown key "origin" in [peer]')


@pytest.mark.parametrize(
    "text, rate",
    [
        ("1MB", 1e6), ("1.5 MB/s", 1.5e6), ("800kB", 8e5), (".5MB", 5e5), ("2e6", 2e6), (70_000, 7e4),
        ("0", "must be at least 66kB/s"), ("1e16", "must be below 1000TB/s"),
        ("10Mb", "may mean bits"), ("10 Mb/s", "may mean bits"), ("800kb", 8e5),
        ("1GB/h", "is not a data rate"), (True, "is not a data rate"),
    ],
)  # fmt: skip
def test_caps_bound_the_claim(text: object, rate: float | str) -> None:
    given = {"download_limit_bytes_per_second": text}
    if isinstance(rate, str):
        with pytest.raises(ConfigError, match=rf"^flag --download-limit: .* {rate}.* try 1\.5MB"):
            load_peer(given, {}, None)
        return
    config = load_peer(given, {}, None)
    assert config.download_limit_bytes_per_second == config.claim_bytes_per_second == rate


def test_relaying_needs_nat() -> None:
    line = peer_refusal({"relay": True}, {"NODE_NAT": "false"})
    assert line.startswith("flag --relay: NODE_NAT switches relaying off")
    for_all = load_peer({"nat": False}, {"NODE_RELAY": "true"}, None)  # the variable of many peers
    assert for_all.relay and not load_peer({}, {}, None).relay


@pytest.mark.parametrize("text, quota", [("50GB/month", "50000000000B/month"), ("5 gb / Week", "5000000000B/week")])
def test_quota_has_a_size_and_a_period(text: str, quota: str) -> None:
    assert load_peer({}, {"NODE_QUOTA": text}, None).quota == quota
    for bad in ("50GB", "50GB/year", "5MB/day", "-1GB/day"):
        with pytest.raises(ConfigError, match=r"NODE_QUOTA: .* like 50GB/month"):
            load_peer({}, {"NODE_QUOTA": bad}, None)


@pytest.mark.parametrize("text, value", [("1.5", 1.5e6), (".5", 5e5), ("2e1", 2e7), ("800kB", 8e5), ("1.5MB/s", 1.5e6)])
def test_plain_numbers_of_options_have_a_unit(text: str, value: float) -> None:
    options = {key: in_unit(text, "MB") for key in ("bandwidth_bytes_per_second", "upload_limit_bytes_per_second")}
    config = load_peer(options, {}, None)
    assert config.bandwidth_bytes_per_second == config.upload_limit_bytes_per_second == value
    assert load_peer({}, {"NODE_DISK_LIMIT_BYTES": "2e9"}, None).disk_limit_bytes == 2e9
    assert peer_refusal({"bandwidth_bytes_per_second": "fast"}).endswith("'fast' is not a number of bytes; try 1.5MB")


def test_template_may_stand_beside_the_models_settings(tmp_path: Path) -> None:
    """In [hf], where one looks for it. It is each machine's own file, and the run's id does not depend on its name."""
    file = tmp_path / "run.toml"
    for table, flags, found in (("[hf]", {}, "a.jinja"), ("[peer]", {}, "a.jinja"), ("[hf]", {"template": "b"}, "b")):
        file.write_text(f'task = "hf"\n{table}\ntemplate = "a.jinja"\n')
        assert load_peer(flags, {}, file).template == Path(found)
        assert load_run(file, {}, ("butterfly",)) == load_run(None, {"task": "hf"}, ("butterfly",))
