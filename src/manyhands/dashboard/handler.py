"""One connection of the dashboard: files of the page, new data as JSON, and a stream of it. GET only."""

from __future__ import annotations

import hmac
import socket
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from manyhands.dashboard.page import page_files
from manyhands.transport.http_handler import DeadlineHandler, HttpRefusal

if TYPE_CHECKING:
    from manyhands.dashboard.server import Dashboard

BEAT_SECONDS = 3.0
"""The page considers the connection lost when nothing comes for a few of these."""
STREAM_BUFFER_BYTES = 1 << 16
TURN_SECONDS = 1.0
LONGEST_PATH = 2000
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class PageHandler(DeadlineHandler):
    def __init__(self, dashboard: Dashboard, *connected: Any) -> None:
        self.dashboard = dashboard
        self._cookie = ""
        super().__init__(*connected)

    def check(self) -> None:
        if not self.dashboard.rate_limiter.passes(self.client_address[0], TURN_SECONDS):
            raise HttpRefusal(429, "Too much is asked at once.", "Try again in a moment.")
        if len(self.path) > LONGEST_PATH:
            raise HttpRefusal(414, f"The address has {len(self.path)} characters; at most {LONGEST_PATH} are read.")
        if self.dashboard.token:
            self._check_token()
        elif not self.is_from_here():
            raise HttpRefusal(403, "Only this machine may look, and no web page of elsewhere.", self.dashboard.url)

    def _check_token(self) -> None:
        """Check the token: in the address at the first visit, then in a cookie."""
        if self._is_token(self._query().get("token", "")):
            self._cookie = f"{self.dashboard.cookie}={self.dashboard.token}; Path=/; Secure; HttpOnly; SameSite=Strict"
            return
        cookies = [cookie.strip().partition("=") for cookie in self.headers.get("Cookie", "").split(";")]
        token = next((value for name, _, value in cookies if name == self.dashboard.cookie), "")
        if not self._is_token(token):
            raise HttpRefusal(
                401, "The token is missing, or another.", "Open the address that was printed at the start."
            )

    def _is_token(self, token: str) -> bool:
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.dashboard.token.encode())

    def _query(self) -> dict[str, str]:
        try:
            fields = parse_qs(self.path.partition("?")[2], max_num_fields=8)
            return {key: values[-1] for key, values in fields.items()}
        except ValueError:
            return {}

    def get(self) -> None:
        path = self.path.partition("?")[0]
        file = page_files().get(path)
        if file is not None:
            self.send(200, file.content, file.kind)
        elif path == "/api/view":
            self.send(200, self.dashboard.reader.update(self._query().get("since", ""))[1], "application/json")
        elif path == "/api/stream":
            self._stream()
        else:
            raise HttpRefusal(404, f"There is nothing at {path:.100}.", "GET /, /api/view or /api/stream")

    def end_headers(self) -> None:
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self._cookie:
            self.send_header("Set-Cookie", self._cookie)
        super().end_headers()

    def _stream(self) -> None:
        """Send server-sent events. One update is under way at a time, so a slow viewer gets fewer and delays no
        other."""
        reader = self.dashboard.reader
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, STREAM_BUFFER_BYTES)
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.finish_headers()
        cursor = self.headers.get("Last-Event-ID") or self._query().get("since", "")
        is_new = True
        while True:
            is_last = reader.is_over
            if is_new:
                cursor, content = reader.update(cursor)
                self.wfile.write(b"id: %s\ndata: %s\n\n" % (cursor.encode(), content))
            if is_last:
                self.wfile.write(b"event: bye\ndata: {}\n\n")
                return
            if not is_new:
                self.wfile.write(b"event: beat\ndata: %d\n\n" % time.time())
            is_new = reader.wait(cursor, BEAT_SECONDS)
