"""How the tests are shared among pytest's workers: a file stays whole, and so does a folder around one running stack."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

WHOLE_FOLDERS = ("tests/e2e",)


class WorkShares(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return next((folder for folder in WHOLE_FOLDERS if file.startswith(f"{folder}/")), file)
