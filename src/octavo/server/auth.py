"""Who may ask: one API key, compared in constant time."""

import hashlib
import hmac
from typing import Final

from octavo.core.errors import AuthenticationError

OPEN_PATHS: Final = frozenset({"/health", "/live", "/metrics"})
"""Answered without a key: probes, and metrics, whose labels hold nothing of any client's.

Every other path needs the key, whether there is something at it or not, so that a new route or an
alias cannot be left open.
"""


class KeyCheck:
    """Lets in who knows the key; everybody, if there is none."""

    def __init__(self, api_key: str | None) -> None:
        self._digest = None if api_key is None else _digest(api_key.encode())

    def check(self, authorization: bytes | None) -> None:
        """Check an Authorization header.

        Raises:
            AuthenticationError: it is missing or holds another key.
        """
        if self._digest is None:
            return
        scheme, _, token = (authorization or b"").partition(b" ")
        # Digests are of one length, so the time tells nothing about the key's.
        matches = hmac.compare_digest(_digest(token.strip()), self._digest)
        if scheme.lower() != b"bearer" or not matches:
            raise AuthenticationError(
                "This server needs its API key in the header 'Authorization: Bearer KEY'."
            )


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
