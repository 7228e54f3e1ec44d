"""Small files of JSON: what is read of a damaged one, and that others cannot read a private one."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.runtime.json_file import MAX_BYTES, read_json, replace_private


def test_missing_file_is_none_and_a_damaged_one_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    assert read_json(file) is None
    file.write_text('{"a": [1, null]}')
    assert read_json(file) == {"a": [1, None]}
    for content in (b"", b"{", b"\xff", b"[" * 3000, b" " * MAX_BYTES + b"1"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"."):
            read_json(file)
    with pytest.raises(IsADirectoryError):
        read_json(tmp_path)


def test_private_file_is_replaced_despite_an_old_draft(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    (tmp_path / ".a.json.new").write_text("left over by a killed peer")
    for text in ("1", "2"):
        replace_private(file, text)
        assert file.read_text() == text and file.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [file]
