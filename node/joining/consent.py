"""Consent to a user's own task: no peer imports a module because a manifest names it.

The manifest, and with it the task's name, comes from any peer that answers at an address. The module is on this
machine, but importing it runs its code. So the user of this machine must name the same task.
"""

from __future__ import annotations

from node.config.manifest import Manifest, ManifestError


def require_consent(manifest: Manifest, named: str | None, held: str) -> None:
    """Check that the user of this machine agrees to the run's task.

    Args:
        named: the task that the user named with --task.
        held: id of the run in the state directory, which the user has agreed to before.

    Raises:
        ManifestError: the run's task is a user's own and was not named, or another task was named.
    """
    task = manifest.config.own_task
    if named is None and (not task or manifest.run_id == held):
        return
    if not task:
        raise ManifestError(f"this run trains {manifest.config.task}, not {named}: join it without --task")
    if named != task:
        wrong = f", not {named}" if named else ""
        raise ManifestError(
            f"this run trains a task of its founder's own, {task}{wrong}: its code never comes from peers; if you have "
            f"its module {task.partition(':')[0]} from a source that you trust, join with --task {task}"
        )
