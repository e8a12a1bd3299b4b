"""A sink that measures every call and stores the inputs of the first few."""

from __future__ import annotations

from typing import Any

from analysis.capture.hooks import Event
from analysis.capture.online import OnlineSink
from analysis.capture.store import StoreSink


class Tee:
    """Hands calls to `online`, and the first `calls` of them to `store` too."""

    def __init__(self, online: OnlineSink, store: StoreSink | None = None, calls: int = 0) -> None:
        self.online, self.store, self.calls = online, store, calls

    @property
    def label(self) -> dict[str, Any]:
        """Scene, clip and step of the call that runs."""
        return self.online.label

    @label.setter
    def label(self, label: dict[str, Any]) -> None:
        self.online.label = label
        if self.store is not None:
            self.store.label = label

    def _storing(self) -> StoreSink | None:
        return self.store if self.store is not None and len(self.store.manifest["calls"]) < self.calls else None

    def begin_call(self) -> None:
        self.online.begin_call()
        if (store := self._storing()) is not None:
            store.begin_call()

    def layer(self, event: Event) -> None:
        self.online.layer(event)
        if (store := self._storing()) is not None:
            store.layer(event)

    def end_call(self) -> None:
        self.online.end_call()
        if (store := self._storing()) is not None:
            store.end_call()

    def drop(self) -> None:
        """Forget the open call."""
        self.online.drop()
        if self.store is not None:
            self.store.begin_call()
