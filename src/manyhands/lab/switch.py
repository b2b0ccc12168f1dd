"""A switch in user space: every frame between the hub's ports is held for the delay of its pair of members.

It is for kernels without netem. Rates are left to the kernel, before a frame gets here and after it leaves. One packet
socket for each port receives frames, one for each pair sends them, both with the virtio header, so that a unit of 64 KB
crosses as one frame and is never segmented or checksummed here. Frames that a port cannot take yet wait, pair by pair,
so that a pair with a slow link of its own does not hold up the others.

    arrives at p1 ──> lane 1→2: (due, frame) (due, frame) ... ──> p2      due = kernel's time of arrival + delay,
                 └──> lane 1→3: ...                            ──> p3           never before the frame in front
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import heapq
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence

from manyhands.facts.errors import BadValue, LabError

MOST_HELD_BYTES = 64 * 2**20
"""The most bytes that wait for one receiver; a frame beyond that is dropped, as by a real switch."""
MOST_PORTS = 256

_VNET_HEADER_BYTES = 10
_FRAME_BYTES = _VNET_HEADER_BYTES + 14 + 8 + 65536
_ADDRESS = slice(_VNET_HEADER_BYTES, _VNET_HEADER_BYTES + 6)
_OBJECT_BYTES = 200
"""The memory of a held frame beside its bytes: a flood of tiny ones must be bounded too."""
_RECEIVE_BYTES = 32 * 2**20
_SEND_BYTES = 128 * 2**10
"""The bytes of each pair in the port's queue; the kernel doubles it, and wakes the switch at half: 1 ms at 1 Gbit/s."""
_BURST_FRAMES = 32
_REFUSED_SECONDS, _REFUSED_LONGEST_SECONDS, _REFUSED_TIMES = 0.001, 0.010, 200
_LONGEST_WAIT_SECONDS = 0.1
_SHORTEST_IDLE_SECONDS = 0.001
_EARLY_SECONDS, _EARLY_STEP_SECONDS, _EARLY_LONGEST_SECONDS = 40e-6, 2e-6, 300e-6
_STAMP = struct.Struct("@ll")
_STATISTICS = struct.Struct("@II")
_ANCILLARY_BYTES = 64

_SOL_PACKET, _PACKET_STATISTICS, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 6, 15, 23
_ETH_P_ALL = 3
_SO_TIMESTAMPNS = 35
_MSG_TRUNC = int(socket.MSG_TRUNC)  # `&` with an enum takes 2 µs
_SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 32, 33
_PR_SET_TIMERSLACK = 29
_PRIORITY = 50


def member_address(member: int) -> bytes:
    """Return the MAC address of a member of the lab."""
    return b"\x02mh\x00" + member.to_bytes(2, "big")


class Lane:
    """The frames on their way from one member to another, in the order in which they came."""

    __slots__ = ("delay_seconds", "frames", "receiver", "refused", "sender", "socket")

    def __init__(self, sender: int, receiver: int, delay_seconds: float) -> None:
        self.sender = sender
        self.receiver = receiver
        self.delay_seconds = delay_seconds
        self.frames: deque[tuple[float, bytes]] = deque()
        self.socket: socket.socket | None = None
        self.refused = 0

    def due(self, arrived: float) -> float:
        """Return when a frame that arrived at `arrived` may leave: a delay that became shorter lets none overtake
        another."""
        due = arrived + self.delay_seconds
        return max(due, self.frames[-1][0]) if self.frames else due


class Switch:
    """Forwards frames between network interfaces of the namespace it runs in; `ports[n]` is member n's."""

    def __init__(self, ports: Sequence[str], delay_seconds: Callable[[int, int], float]) -> None:
        if not 0 < len(ports) <= MOST_PORTS:
            raise BadValue(f"A switch of {len(ports)} ports; there may be 1 to {MOST_PORTS}.")
        self.ports = tuple(ports)
        self.frames = 0
        self.bytes = 0
        self.dropped = 0
        self.notes: list[str] = []
        """Everything that this machine refused, and the consequences."""
        members = range(len(ports))
        self._lanes = {
            (sender, receiver): Lane(sender, receiver, _checked(delay_seconds(sender, receiver)))
            for sender in members
            for receiver in members
            if sender != receiver
        }
        self._ways = [
            {member_address(other): self._lanes[member, other] for other in members if other != member}
            for member in members
        ]
        """Per port: address -> lane."""
        self._held_bytes = [0] * len(ports)
        self._turn: list[tuple[float, int, Lane]] = []
        """A heap with one entry for each lane that has frames and is not blocked: when its next frame is due."""
        self._blocked: dict[int, Lane] = {}
        """Socket number -> lane, for lanes whose socket is full."""
        self._serial = 0
        self._early_seconds = _EARLY_SECONDS
        """The cost of waking up and sending here: the switch wakes this much before a frame is due."""

    def set_delay(self, sender: int, receiver: int, seconds: float) -> None:
        """Set the delay from now on; frames that are on their way keep their time, and none overtakes another."""
        self._lanes[sender, receiver].delay_seconds = _checked(seconds)

    def run(self, is_over: Callable[[], bool], on_idle: Callable[[float], float]) -> None:
        """Forward until `is_over`; `on_idle(now)` does other small work and returns when it is to be called next.

        This takes over the process: real-time priority, no garbage collection.
        """
        inputs: dict[int, tuple[int, socket.socket]] = {}
        with select.epoll() as self._poll:
            try:
                for member, port in enumerate(self.ports):
                    receiving = _open(port, receiving=True)
                    inputs[receiving.fileno()] = (member, receiving)
                    self._poll.register(receiving, select.EPOLLIN)
                self.notes = be_punctual()
                self._forward(inputs, is_over, on_idle)
            finally:
                gc.enable()
                for _, each in inputs.values():
                    each.close()
                self._clear()

    def _forward(
        self,
        inputs: dict[int, tuple[int, socket.socket]],
        is_over: Callable[[], bool],
        on_idle: Callable[[float], float],
    ) -> None:
        poll, monotonic = self._poll, time.monotonic
        next_idle = 0.0
        while not is_over():
            now = monotonic()
            if now >= next_idle:
                next_idle = max(on_idle(now), now + _SHORTEST_IDLE_SECONDS)
                self.dropped += sum(_lost(port) for _, port in inputs.values())
                now = monotonic()
            until = min(next_idle, now + _LONGEST_WAIT_SECONDS)
            if self._turn:
                until = min(until, self._turn[0][0] - self._early_seconds)
            # epoll counts milliseconds, select microseconds
            ready = select.select((poll,), (), (), max(0.0, until - now))[0]
            for number, _ in poll.poll(0) if ready else ():
                if number in inputs:
                    self._receive(*inputs[number])
                else:
                    self._unblock(number)
            self._send_due(monotonic() + self._early_seconds, woken_for_it=not ready and until > now)

    def _receive(self, member: int, port: socket.socket) -> None:
        """Put what has arrived at a port into the lanes."""
        ways, receive = self._ways[member], port.recvmsg
        for _ in range(_BURST_FRAMES):
            try:
                frame, ancillary, flags, _address = receive(_FRAME_BYTES, _ANCILLARY_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # the cable was pulled: there is nothing more, for now
                    return
                self.dropped += 1  # a kind of frame that the header cannot describe
                continue
            if flags & _MSG_TRUNC:
                self.dropped += 1
                continue
            arrived = _arrival(ancillary)
            lane = ways.get(frame[_ADDRESS])
            if lane is not None:
                self._hold(lane, arrived, frame)
            elif frame[_VNET_HEADER_BYTES] & 1:  # to all
                for lane in ways.values():
                    self._hold(lane, arrived, frame)
            else:
                self.dropped += 1

    def _hold(self, lane: Lane, arrived: float, frame: bytes) -> None:
        held = self._held_bytes[lane.receiver] + len(frame) + _OBJECT_BYTES
        if held > MOST_HELD_BYTES:
            self.dropped += 1
            return
        self._held_bytes[lane.receiver] = held
        due = lane.due(arrived)
        lane.frames.append((due, frame))
        if len(lane.frames) == 1:
            self._queue(lane, due)

    def _queue(self, lane: Lane, due: float) -> None:
        self._serial += 1  # of those due at once, the first come goes first
        heapq.heappush(self._turn, (due, self._serial, lane))

    def _send_due(self, now: float, *, woken_for_it: bool) -> None:
        """Send what is due by `now`, in that order; after a burst, look at the ports again."""
        turn = self._turn
        for _ in range(_BURST_FRAMES * 8):
            if not turn or turn[0][0] > now:
                return
            due, _, lane = heapq.heappop(turn)
            frame = lane.frames[0][1]
            try:
                if lane.socket is None:
                    lane.socket = _open(self.ports[lane.receiver], receiving=False)
                lane.socket.send(frame)
            except BlockingIOError:
                self._block(lane)
                continue
            except OSError as error:
                # ENOBUFS: the port's queue is full, and no socket reports when it no longer is
                if error.errno == errno.ENOBUFS and lane.refused < _REFUSED_TIMES:
                    lane.refused += 1
                    self._queue(lane, now + min(lane.refused * _REFUSED_SECONDS, _REFUSED_LONGEST_SECONDS))
                    continue
                self.dropped += 1
            else:
                self.frames += 1
                self.bytes += len(frame) - _VNET_HEADER_BYTES
                if woken_for_it:
                    woken_for_it = False
                    self._learn(time.monotonic() - due)
            lane.refused = 0
            lane.frames.popleft()
            self._held_bytes[lane.receiver] -= len(frame) + _OBJECT_BYTES
            if lane.frames:
                self._queue(lane, lane.frames[0][0])

    def _learn(self, late_seconds: float) -> None:
        """Wake a little earlier after a frame that left late, and the reverse: half of them then leave in time."""
        early = self._early_seconds + (_EARLY_STEP_SECONDS if late_seconds > 0 else -_EARLY_STEP_SECONDS)
        self._early_seconds = min(max(early, 0.0), _EARLY_LONGEST_SECONDS)

    def _block(self, lane: Lane) -> None:
        """Wait until the lane's socket can be written again."""
        assert lane.socket is not None
        self._blocked[lane.socket.fileno()] = lane
        self._poll.register(lane.socket, select.EPOLLOUT)

    def _unblock(self, number: int) -> None:
        lane = self._blocked.pop(number)
        self._poll.unregister(number)
        self._queue(lane, lane.frames[0][0])

    def _clear(self) -> None:
        """Discard all frames that are on their way."""
        for lane in self._lanes.values():
            lane.frames.clear()
            if lane.socket is not None:
                lane.socket.close()
                lane.socket = None
        self._turn.clear()
        self._blocked.clear()
        self._held_bytes = [0] * len(self.ports)


def be_punctual() -> list[str]:
    """Make this process wake up on time, whatever else computes here. Return what was refused."""
    notes = []
    with contextlib.suppress(OSError, ValueError):  # there may be a socket for every pair
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    except (OSError, AttributeError):
        notes.append("timer slack stays at its default: delays may be 0.05 ms longer")
    try:
        # processes that this one starts must not have the priority
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(_PRIORITY))
    except OSError as error:
        notes.append(f"no real-time priority ({error.strerror}): delays grow by milliseconds while the cores are busy")
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
    return notes


def _open(port: str, *, receiving: bool) -> socket.socket:
    """Return a packet socket on an interface; one that only sends receives no frames."""
    opened = None
    try:
        opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        opened.setblocking(False)
        opened.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        if receiving:
            opened.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
            opened.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            opened.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BYTES)
        else:
            opened.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _SEND_BYTES)
        opened.bind((port, _ETH_P_ALL if receiving else 0))
    except OSError as error:
        if opened is not None:
            opened.close()
        if not receiving:
            raise
        raise LabError(
            f"The switch cannot listen on {port}: {error.strerror}.",
            hint="It needs root and the hub's network namespace; `manyhands lab down`, then `up` makes the ports.",
        ) from error
    return opened


def _lost(port: socket.socket) -> int:
    """Return the frames that the kernel dropped since the last call, because they were not read in time."""
    try:
        counts = port.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, _STATISTICS.size)
    except OSError:
        return 0
    return int(_STATISTICS.unpack(counts)[1])


def _arrival(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return when the kernel saw a frame, on this process's clock, however late it is read."""
    for _, _, stamp in ancillary:
        seconds, nanoseconds = _STAMP.unpack(stamp)
        now = time.monotonic()
        age = time.time() - seconds - nanoseconds * 1e-9
        return now - age if 0.0 <= age < 1.0 else now  # else the clock was set in between
    return time.monotonic()


def _checked(delay_seconds: float) -> float:
    if not 0.0 <= delay_seconds < 60.0:
        raise BadValue(f"A delay of {delay_seconds} s; it may be 0 to 60 s.")
    return delay_seconds
