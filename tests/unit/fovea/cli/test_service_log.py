"""The log in the state folder: bounded, readable by service, and followed across its replacement."""

import itertools
import pathlib
import stat
import threading

from typer.testing import CliRunner

from fovea.cli.main import app
from fovea.cli.state_folder import ServiceLog, follow, log_folder, newest_lines, services_in


def texts(lines: list[str]) -> list[str]:
    return [line.partition("│ ")[2] for line in lines]


def test_the_newest_lines_stay_and_the_folder_stays_small(tmp_path: pathlib.Path) -> None:
    log = ServiceLog(tmp_path / "logs", most_bytes=10_000)
    for number in range(1000):
        log.write("trainer", f"line {number}")
    log.close()
    found = texts(newest_lines(tmp_path / "logs", "", 10_000))
    assert found == [f"line {number}" for number in range(1000 - len(found), 1000)]
    assert len(found) > 100
    assert sum(path.stat().st_size for path in (tmp_path / "logs").iterdir()) < 10_200
    assert stat.S_IMODE((tmp_path / "logs").stat().st_mode) == 0o700


def test_services_are_told_apart_by_name_and_kind(tmp_path: pathlib.Path) -> None:
    log = ServiceLog(log_folder(tmp_path))
    for name in ("sampler", "sampler2", "sampler-teacher", "gateway"):
        log.write(name, f"{name} says │ sampler")
    log.close()
    folder = log_folder(tmp_path)
    assert len(newest_lines(folder, "sampler", 9)) == 3
    assert texts(newest_lines(folder, "sampler2", 9)) == ["sampler2 says │ sampler"]
    assert texts(newest_lines(folder, "", 2)) == ["sampler-teacher says │ sampler", "gateway says │ sampler"]
    assert services_in(folder) == ["gateway", "sampler", "sampler-teacher", "sampler2"]
    shown = CliRunner().invoke(app, ["logs", "gateway", "--state-dir", str(tmp_path)])
    assert shown.output.endswith(" gateway │ gateway says │ sampler\n")
    other = CliRunner().invoke(app, ["logs", "traner", "--state-dir", str(tmp_path)])
    assert other.exit_code == 2
    assert other.output == (
        "SERVICE: the log has no lines from 'traner'; it has lines from gateway, sampler, sampler-teacher, sampler2\n"
    )


def test_a_start_goes_on_where_the_last_one_ended(tmp_path: pathlib.Path) -> None:
    for word in ("first", "second"):
        log = ServiceLog(tmp_path / "logs")
        log.write("fovea", word)
        log.close()
    assert texts(newest_lines(tmp_path / "logs", "fovea", 9)) == ["first", "second"]


def test_it_is_followed_over_its_replacement_until_nothing_comes(tmp_path: pathlib.Path) -> None:
    log = ServiceLog(tmp_path, most_bytes=2_000)
    log.write("trainer", "before")
    is_over = threading.Event()
    following = follow(tmp_path, "trainer", is_over.is_set)
    seen: list[str] = []
    reading = threading.Thread(target=lambda: seen.extend(texts(list(following))))
    reading.start()
    for number in range(60):  # in parts smaller than the portion that is moved at once
        for service in ("gateway", "trainer"):
            log.write(service, f"{service} {number}")
        threading.Event().wait(0.05)
    is_over.set()
    reading.join(30)
    log.close()
    assert seen[-1] == "trainer 59"
    assert all(int(b.split()[1]) == int(a.split()[1]) + 1 for a, b in itertools.pairwise(seen))
