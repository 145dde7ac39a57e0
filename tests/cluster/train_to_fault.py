"""examples/train.py up to a fault, started by torchrun: `train_to_fault.py PLACE STEP FOLDER FLAGS...`.

At a place of a step the ranks of the second host write that they are there, and wait until the test has cut the link or
kills them. What a rank raises it writes too, and when.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import train
from parallel import Mesh
from sonic_ep import EPGroup
from sonic_ep.config import TransportConfig
from sonic_ep.transports import GroupTransport
from tests.cluster.imitated_hosts import RANKS_PER_HOST

TIMEOUT = 4.0


class Collective(NamedTuple):
    """A collective of a layer of the model, and how errors name it."""

    stage: str
    layer: int
    backward: bool

    def __str__(self) -> str:
        return f"{self.stage} of layer {self.layer}{' in backward' if self.backward else ''}"


PLACES = {
    "forward": Collective("dispatch within a host", 2, False),
    "backward": Collective("combine across hosts", 1, True),
    "checkpoint": "checkpoint",
}


class Fault:
    """The fault of this rank. Its methods replace those of train.py and the layer."""

    def __init__(self, place: str, step: int, folder: Path) -> None:
        self.place, self.step, self.folder = place, step, folder
        self.rank = int(os.environ["RANK"])
        self.calls = 0  # of the collective of the place
        self.mesh: Mesh | None = None
        self._set_limits, self._all_to_all = Mesh.set_limits, EPGroup.all_to_all

    def strike(self) -> None:
        if self.rank < RANKS_PER_HOST:
            return
        (self.folder / f"reached-{self.rank}").write_text("")
        while not (self.folder / "struck").exists():
            time.sleep(0.05)

    def set_limits(self, mesh: Mesh, transport: TransportConfig) -> None:
        self.mesh = mesh
        self._set_limits(mesh, transport)

    def shorten_limits(self) -> None:
        """After the first steps, which take long on a busy machine."""
        assert self.mesh is not None
        of_layers = [held.group for held in self.mesh.ep.held.values() if isinstance(held, GroupTransport)]
        for group in (self.mesh.world, self.mesh.ep, *of_layers):
            group.timeout = TIMEOUT

    def all_to_all(
        self, group: EPGroup, *args: Any, stage: str = "", layer: int | None = None, **others: Any
    ) -> torch.Tensor:
        backward = torch._C._current_graph_task_id() != -1
        place = PLACES["forward" if self.place == "checkpoint" else self.place]
        if (stage, layer, backward) == place:
            self.calls += 1
            if self.calls == self.step - 1:
                self.shorten_limits()
            if self.calls == self.step and self.place != "checkpoint":
                self.strike()
        return self._all_to_all(group, *args, stage=stage, layer=layer, **others)

    def watch_files(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).endswith(f"step_{self.step:06d}.partial/__{self.rank}_0.distcp"):
            self.strike()


def main(place: str, step: str, folder: str, *flags: str) -> None:
    fault = Fault(place, int(step), Path(folder))
    (fault.folder / f"pid-{fault.rank}").write_text(str(os.getpid()))
    if place == "checkpoint":
        sys.addaudithook(fault.watch_files)
    with (
        patch.object(Mesh, "set_limits", lambda *args: fault.set_limits(*args)),
        patch.object(EPGroup, "all_to_all", lambda *args, **kwargs: fault.all_to_all(*args, **kwargs)),
    ):
        try:
            train.main(flags)
        except RuntimeError as error:
            raised = json.dumps([type(error).__name__, str(error), time.time()])
            (fault.folder / f"raised-{fault.rank}.partial").write_text(raised)
            (fault.folder / f"raised-{fault.rank}.partial").rename(fault.folder / f"raised-{fault.rank}")
            raise


if __name__ == "__main__":
    main(*sys.argv[1:])
