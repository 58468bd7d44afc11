"""What is looked at before ranks start on hosts: real probes and ports, and the verdict on what they found."""

import json
import subprocess
import sys
import threading
import time

import pytest

from atoll.agent.preflight import judge, listen, reach, unreachable

GOOD = {"skew_s": 0.0, "shm_bytes": 8 << 30, "disk_bytes": 100 << 30, "gpus": [], "torch": "2.13.0+cu130"}


def with_gpus(driver="580.65", used_mb=3, torch="2.13.0+cu130"):
    gpu = {"index": "0", "name": "NVIDIA L4", "driver": driver, "used_mb": used_mb}
    return {**GOOD, "gpus": [gpu], "torch": torch}


def lines(**probes):
    return [(str(finding), finding.fatal) for finding in judge(probes)]


def test_the_program_answers_with_one_json_line():
    wish = json.dumps({"address": "127.0.0.1", "port": 1, "wait_s": 5})
    command = [sys.executable, "-m", "atoll.agent.preflight", "reach", wish]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "refused" in json.loads(answer.stdout)["error"]


def test_a_port_that_can_be_reached_and_one_that_cannot(capsys):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(listen("127.0.0.1", 0, 1, 10.0)))
    thread.start()
    text = ""
    while not text:
        time.sleep(0.02)
        text = capsys.readouterr().out
    port = json.loads(text)["port"]
    reached = reach("127.0.0.1", port, 5.0)
    assert (reached["from"], reached["interface"]) == ("127.0.0.1", "lo")
    thread.join()
    assert taken == [{"seen": 1, "interface": "lo"}]
    assert "refused" in reach("127.0.0.1", port, 5.0)["error"]


def test_nobody_listens_for_one_who_has_gone():
    wish = json.dumps({"address": "127.0.0.1", "port": 0, "num_peers": 1, "wait_s": 300})
    command = [sys.executable, "-m", "atoll.agent.preflight", "listen", wish]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert json.loads(listener.stdout.readline())["port"] > 0
        assert listener.communicate(timeout=60)[0] == '{"seen": 0, "interface": ""}\n'


def test_a_port_that_somebody_else_holds_is_told():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as held:
        answer = listen("127.0.0.1", held.getsockname()[1], 1, 0.1)
    assert "in use" in answer["error"]


def test_good_hosts_have_no_findings():
    assert lines(a=GOOD, b=with_gpus()) == []


@pytest.mark.parametrize(
    ("seen", "words", "fatal"),
    [
        ({**GOOD, "skew_s": 90.0}, "clock differs by +90 s", False),
        ({**GOOD, "shm_bytes": 64 << 20}, "/dev/shm has 64 MiB free", False),
        ({**GOOD, "disk_bytes": 500 << 20}, "disk has 500 MiB free", False),
        ({**GOOD, "disk_bytes": 1 << 20}, "disk has 1 MiB free", True),
        (with_gpus(used_mb=9000), "GPU 0 (8.8 GiB) in use by others", False),
        (with_gpus(driver="535.104.05"), "needs driver 580 or newer, it has 535.104.05", True),
        (with_gpus(torch="2.13.0+cpu"), "CPU build though the host has GPUs", False),
    ],
)
def test_each_fault_is_one_line_with_the_host_first(seen, words, fatal):
    ((text, is_fatal),) = lines(b=seen)
    assert text.startswith("b: ")
    assert words in text
    assert is_fatal == fatal


def test_different_torch_versions_are_refused_but_not_different_builds():
    ((text, fatal),) = lines(a=GOOD, b={**GOOD, "torch": "2.11.0"})
    assert fatal
    assert "a 2.13.0+cu130, b 2.11.0" in text
    assert lines(a=GOOD, b={**GOOD, "torch": "2.13.0+cu126"}) == []


def test_an_unreachable_head_names_both_addresses_the_port_and_the_range():
    text = str(unreachable("b", "a", "10.0.0.1", 29500, "10.0.0.2", "timed out"))
    assert all(part in text for part in ("b:", "10.0.0.1:29500", "10.0.0.2", "1024-65535", "timed out"))
