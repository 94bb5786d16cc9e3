"""Errors of the system in plain words."""

import ssl
import urllib.error

from cairn.core.errors import system_words


def test_the_words_of_the_system_stand_without_their_wrapping():
    refused = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 9)")
    assert system_words(refused) == "connection refused"
    assert system_words(urllib.error.URLError(refused)) == "connection refused"
    assert (
        system_words(OSError(-2, "Name or service not known"))
        == "[Errno -2] Name or service not known"
    )
    assert system_words(TimeoutError()) == "TimeoutError"
    untrusted = ssl.SSLCertVerificationError(1, "certificate verify failed")
    assert "certificate verify failed" in system_words(urllib.error.URLError(untrusted))
