"""Frames between our processes: whole or not at all, with descriptors, and strangers told from friends."""

from __future__ import annotations

import os
import socket

import pytest

from syncline.launcher.wire import NotAFrame, receive_frame, send_frame


def test_message_payload_and_descriptors_arrive_together() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        read_end, write_end = os.pipe()
        send_frame(ours, {"say": "here"}, b"x" * 3_000, [write_end])
        send_frame(ours, {"say": "and more"})
        os.close(write_end)
        frame = receive_frame(theirs, most_descriptors=4)
        assert frame is not None
        assert (frame.message, frame.payload) == ({"say": "here"}, b"x" * 3_000)
        (received,) = frame.descriptors
        os.write(received, b"through")
        os.close(received)
        assert os.read(read_end, 100) == b"through"
        os.close(read_end)
        more = receive_frame(theirs, most_descriptors=4)
        assert more is not None
        assert (more.message, more.payload, more.descriptors) == ({"say": "and more"}, b"", [])


@pytest.mark.parametrize("most_descriptors", [0, 4])
def test_an_end_in_the_middle_is_an_end_and_leaves_no_descriptor_open(most_descriptors: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(ours, [b"SYN1\0\0\0\7"], [0] if most_descriptors else [])
        ours.shutdown(socket.SHUT_WR)
        assert receive_frame(theirs, most_descriptors) is None
        assert receive_frame(theirs, most_descriptors) is None
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"SYN1\xff\xff\xff\xff\0\0\0\0",
        b"SYN1\0\0\0\2\0\0\0\0[]",
        b"SYN1\0\0\0\2\0\0\0\0{x",
    ],
)
def test_what_is_no_frame_is_refused(words: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(words)
        with pytest.raises(NotAFrame):
            receive_frame(theirs)
