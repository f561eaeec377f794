"""Parts of `testing.hosts` that need no host: the timeline's chart and the proxy."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from safehold.testing.hosts import Hosts, Proxy, Timeline, tell, timeline
from safehold.testing.hosts.timeline import Moment


def chart_of(*moments: tuple[int | None, float, str], width: int = 49) -> list[str]:
    found = Timeline(["host-0", "host-1"], clock=lambda: 100.0)
    for host, t, what in moments:
        found.put(Moment(host=host, t=100.0 + t, what=what))
    return found.render(width).splitlines()


def test_the_chart_has_a_line_for_each_host_and_an_axis() -> None:
    moments = [(0, 1.0, "saved"), (1, 1.0, "saved"), (0, 2.0, "committed"), (1, 2.5, "killed"), (1, 3.5, "replaced")]
    moments += [(0, 3.0, "paused"), (0, 3.5, "resumed"), (None, 4.1, "restored"), (0, 0.5, "sang")]
    assert chart_of(*moments) == [
        "host-0 -----*----s---------C---------(....)-----R",
        "host-1 ----------s--------------X         +-----R",
        "       0s        1s        2s        3s        4s",
        "* sang  s saved  C committed  X killed  ( paused  + replaced  ) resumed  R restored",
    ]


def test_moments_of_one_column_stand_beside_each_other() -> None:
    row = chart_of((0, 1.0, "saved"), (0, 1.0, "saved"), (0, 1.001, "committed"), (0, 4.1, "ended"))[0]
    assert row == "host-0 ----------sC-----------------------------<"


def test_an_empty_chart_is_drawn() -> None:
    assert chart_of()[0].startswith("host-0 ---")


def test_what_a_process_tells_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    begun = time.monotonic()
    tell("committed", 12)
    moment = timeline.heard(capsys.readouterr().out.rstrip("\n"), 3)
    assert moment is not None and (moment.host, moment.what, moment.detail) == (3, "committed", "12")
    assert begun <= moment.t <= time.monotonic()
    assert timeline.heard("an ordinary line", 0) is None
    assert timeline.heard(timeline.PREFIX + "no json", 0) is None


def echo(server: socket.socket) -> None:
    found, _ = server.accept()
    with found:
        while data := found.recv(1 << 16):
            found.sendall(data)


def test_a_proxy_passes_everything_on_and_ends_streams_in_order() -> None:
    payload = bytes(range(256)) * 4096
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=echo, args=(server,))
        thread.start()
        with Proxy(server.getsockname(), delay_s=0.02) as proxy:
            with socket.create_connection(proxy.address, timeout=5) as here:
                here.settimeout(5)
                sender = threading.Thread(target=lambda: (here.sendall(payload), here.shutdown(socket.SHUT_WR)))
                sender.start()
                found = b""
                while data := here.recv(1 << 16):
                    found += data
                sender.join()
            assert found == payload
            assert proxy.passed_bytes == 2 * len(payload)
        thread.join(5)


def test_a_proxy_without_a_server_behind_it_resets() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    with Proxy(address) as proxy:
        with pytest.raises(ConnectionResetError):  # by connect, where the reset is faster than it
            with socket.create_connection(proxy.address, timeout=5) as here:
                here.recv(1)


def test_a_number_of_hosts_that_cannot_be_is_refused() -> None:
    for num in (1, 9):
        with pytest.raises(ValueError, match="2 to 8 are possible"):
            Hosts(num)
