"""Who could have written a built kernel. Its library is loaded into this process, so it runs as this user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mla_backend.jit.store import LIBRARY, shipped_dirs


def why_not_trusted(entry: Path) -> str | None:
    """One line saying why the library of an entry must not be loaded, and what to do; None if it may be.

    Neither it nor its entry nor the folder of kernels may be writable by every user. Each belongs to this
    user, to root, or to the owner of the folder of kernels, which in turn belongs to one of the first two,
    unless MLA_BACKEND_CACHE names it or it is part of this package. In a folder that a group may write to,
    each of the group may own entries.
    """
    store = entry.parent
    try:
        found = {path: path.stat() for path in (store, entry, entry / LIBRARY)}
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    for path, status in found.items():
        # With the sticky bit, as /tmp has it, nobody can replace what others have made there.
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return (
                f"every user can write to {path}, so that anyone could run code as you; remedy: chmod o-w "
                f"{path}, or use another folder (MLA_BACKEND_CACHE)"
            )
    trusted = {os.geteuid(), 0}
    if store in shipped_dirs() or os.environ.get("MLA_BACKEND_CACHE"):
        trusted.add(found[store].st_uid)
    is_shared = bool(found[store].st_mode & stat.S_IWGRP)
    for path, status in found.items():
        of_group = is_shared and path != store and status.st_gid == found[store].st_gid
        if status.st_uid not in trusted and not of_group:
            return (
                f"{path} belongs to user {status.st_uid}, neither to you ({os.geteuid()}) nor to root; "
                "remedy: delete it, so that it is built again, or name a folder that you trust in "
                "MLA_BACKEND_CACHE"
            )
    return None
