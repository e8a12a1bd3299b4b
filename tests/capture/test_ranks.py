"""Which rank a process is, and waiting for the others on the file system."""

import json
import threading
import time

import pytest

from analysis.capture.ranks import Rank, this_rank, wait_for_ranks
from analysis.results import schema


def leave(out, rank, launch="a"):
    folder = Rank(rank, 2, launch).folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / schema.RUN).write_text(json.dumps({"launch": launch}))


def test_ranks_from_the_environment():
    assert this_rank({}) is None and this_rank({"RANK": "0", "WORLD_SIZE": "1"}) is None
    rank = this_rank({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "29500"})
    assert (rank.index, rank.world) == (1, 4) and rank.launch.endswith("29500")
    with pytest.raises(ValueError, match=r"RANK=4 is not in 0\.\.3"):
        this_rank({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(ValueError, match="RANK='one'"):
        this_rank({"RANK": "one", "WORLD_SIZE": "4"})


def test_waiting_ends_with_the_last_rank_or_with_the_time(tmp_path):
    leave(tmp_path, 0)
    assert set(wait_for_ranks(tmp_path, Rank(0, 2, "a"), timeout_s=0.1)) == {0}
    threading.Timer(0.2, leave, (tmp_path, 1)).start()
    started = time.monotonic()
    assert set(wait_for_ranks(tmp_path, Rank(0, 2, "a"), timeout_s=20, poll_s=0.01)) == {0, 1}
    assert time.monotonic() - started < 10


def test_an_earlier_launch_does_not_count(tmp_path):
    leave(tmp_path, 0)
    leave(tmp_path, 1, launch="yesterday")
    (tmp_path / "rank-2").mkdir()
    (tmp_path / "rank-2" / schema.RUN).write_text("not json")
    assert set(wait_for_ranks(tmp_path, Rank(0, 3, "a"), timeout_s=0)) == {0}
