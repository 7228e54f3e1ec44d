"""Consent to a user's own task, and to a model of Hugging Face: a manifest alone decides neither.

The manifest, and with it the task's name, comes from any peer that answers at an address. The module is on this
machine, but importing it runs its code; and a model may be a download of many gigabytes. So the user of this machine
must name the same task, and a model.
"""

from __future__ import annotations

from node.config.manifest import Manifest, ManifestError


def require_consent(manifest: Manifest, named: str | None, held: str) -> None:
    """Check that the user of this machine agrees to the run's task: by --task, or before, to the run that is `held`."""
    task = manifest.config.consent_task
    if named is None and (not task or manifest.run_id == held):
        return
    if not task:
        raise ManifestError(f"this run trains {manifest.config.task}, not {named}: join it without --task")
    if manifest.model and named != task:
        wrong = f", not {named}" if named else ""
        base, size = manifest.model.base, manifest.model.size / 1e9
        raise ManifestError(
            f"this run fine-tunes a model of Hugging Face{wrong}, which its founder calls {base} ({size:.2f} GB): if "
            "you have it, or want it downloaded, join with --task hf --model FOLDER_OR_ORG/NAME@REVISION --data FILE"
        )
    if named != task:
        wrong = f", not {named}" if named else ""
        raise ManifestError(
            f"this run trains a task of its founder's own, {task}{wrong}: its code never comes from peers; if you have "
            f"its module {task.partition(':')[0]} from a source that you trust, join with --task {task}"
        )
