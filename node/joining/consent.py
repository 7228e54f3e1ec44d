"""Whether this machine is to run somebody's code: a stranger's word must not have a module imported here.

The name of a user's own task comes with a run's manifest, from whoever answers at an address. Its module lies on this
machine, but importing it is running it, and many an installed module does something when it is imported. So the person
here names the task, too.
"""

from __future__ import annotations

from node.config.manifest import Manifest, ManifestError


def require_consent(manifest: Manifest, named: str | None, held: str) -> None:
    """
    Args:
        named: the task that the person at this machine named, by --task.
        held: id of the run that the state directory is of: nobody got it there without consent.

    Raises:
        ManifestError: the run's task is a user's own and was not named here, or another was.
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
            f"its module {task.partition(':')[0]} from somebody whom you trust, join with --task {task}"
        )
