"""Settings that were changed in a running peer: kept for its later starts, below options and variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.config.peer_sources import SETTINGS_FILE, apply_saved, load_peer, serialize, with_setting
from node.config.toml import ConfigError
from tests.support.refusals import one_line


def test_kept_settings_win_over_files_only(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("[peer]\nupload_limit_bytes_per_second = 3e6\ndownload_limit_bytes_per_second = 4e6\n")
    assert apply_saved(load_peer({}, {}, run), tmp_path) == (load_peer({}, {}, run), [])
    (tmp_path / SETTINGS_FILE).write_bytes(serialize({"upload-limit": "1MB", "download-limit": "off"}))
    config, lines = apply_saved(load_peer({}, {}, run), tmp_path)
    assert (config.upload_limit_bytes_per_second, config.download_limit_bytes_per_second) == (1e6, None)
    assert config.claim_bytes_per_second == 1e6 and lines == []
    given = load_peer({"upload_limit_bytes_per_second": "2MB"}, {"NODE_DOWNLOAD_LIMIT_BYTES_PER_SECOND": "5e6"}, run)
    config, lines = apply_saved(given, tmp_path)
    assert config == given
    assert lines == [
        "flag --upload-limit wins over the saved setting upload-limit = 1MB",
        "NODE_DOWNLOAD_LIMIT_BYTES_PER_SECOND wins over the saved setting download-limit = off",
    ]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"upload-limit": "much"}', b'{"upload-limit": [1]}'])
def test_damaged_settings_get_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SETTINGS_FILE).write_bytes(content)
    if content == b"[]":
        assert apply_saved(load_peer({}, {}, None), tmp_path)[1] == []
        return
    line = one_line(ConfigError, apply_saved, load_peer({}, {}, None), tmp_path)
    assert line.startswith("upload-limit: ") or "settings.json is damaged" in line


def test_only_known_settings_can_be_set() -> None:
    with pytest.raises(ConfigError, match=r'cannot be set: did you mean "upload-limit"\?'):
        with_setting(load_peer({}, {}, None), "upload_limit", "1MB")
