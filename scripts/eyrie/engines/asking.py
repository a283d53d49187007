"""One request to a server and its reply, under one deadline; every way to fail gets its kind."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection

from eyrie.engines import Answered
from eyrie.engines.replies import Dialect, Failure, Request, shortly

_CONNECT_TIMEOUT = 10.0
_PIECE = 1 << 16
# An answer may take an hour in which nothing is sent: the kernel asks every minute whether the other side is
# still there, and keeps what lies between from forgetting the connection.
_KEEP_ALIVE = [
    *HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), seconds)
        for name, seconds in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 60), ("TCP_KEEPCNT", 5))
        if hasattr(socket, name)
    ),
]
_BUSY = frozenset({408, 425, 429, 503})


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **settings: Any) -> None:
        super().init_poolmanager(*arguments, **settings, socket_options=_KEEP_ALIVE)


def new_session(servers: int) -> requests.Session:
    """A session for one thread: one connection to each server, kept open. It reads no proxy settings."""
    session = requests.Session()
    session.trust_env = False
    session.headers["Accept-Encoding"] = "identity"
    session.mount("http", _Adapter(pool_connections=servers, pool_maxsize=1))
    return session


def ask(session: requests.Session, url: str, dialect: Dialect, request: Request, timeout: float) -> Answered:
    """The answer to one request, with what states it leaves, within `timeout` seconds.

    Raises Failure, and StoreError for hidden states that can't be right.
    """
    deadline = time.monotonic() + timeout
    try:
        with session.post(
            url + dialect.path,
            json=dialect.body(request),
            timeout=(min(_CONNECT_TIMEOUT, timeout), timeout),
            allow_redirects=False,
            stream=True,
        ) as response:
            content = b"".join(_pieces(response, deadline))
            if response.status_code != requests.codes.ok:
                raise _refusal(response.status_code, content)
    except (requests.Timeout, urllib3.exceptions.TimeoutError, TimeoutError) as error:
        raise Failure("timeout", f"no answer in {timeout:.0f} s: {error}") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        refused = any(isinstance(cause, ConnectionRefusedError) for cause in _causes(error))
        raise Failure("refused" if refused else "reset", shortly(error)) from error
    reply = _parsed(content)
    ids, reason = dialect.read(request, reply)
    return Answered(request.key, ids, reason, dialect.states(request, ids, reply, deadline))


def _pieces(response: requests.Response, deadline: float) -> Iterator[bytes]:
    """The reply's content as it comes: no piece waits for more, so that a slow drip meets the deadline."""
    while piece := response.raw.read1(_PIECE):
        if time.monotonic() > deadline:
            raise TimeoutError("the reply came too slowly")
        yield piece


def _refusal(status: int, content: bytes) -> Failure:
    text = f"status {status}: {shortly(content.decode(errors='replace'))}"
    if status in _BUSY:
        return Failure("unavailable", text)
    return Failure("server_error" if status >= 500 else "rejected", text)


def _parsed(content: bytes) -> Mapping[str, Any]:
    try:
        reply = json.loads(content)
    except ValueError as error:
        raise Failure("malformed_reply", f"no JSON: {error}") from error
    if not isinstance(reply, dict):
        raise Failure("malformed_reply", f"expected a JSON object, saw {shortly(reply)}")
    return reply


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from; libraries keep a cause among the arguments, too."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            reason = getattr(one, "reason", None)
            waiting += [one.__cause__, one.__context__]
            waiting += [value for value in (*one.args, reason) if isinstance(value, BaseException)]
