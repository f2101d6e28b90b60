"""The webhook's certificate: whole or not at all, and replaced without a failed handshake."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest
from deltashard_operator.tls.certificate import Certificate
from prometheus_client import CollectorRegistry

from tests.support.server.apiserver import Authority, put


def trusting(*authorities: Authority) -> ssl.SSLContext:
    """A client that trusts these."""
    context = ssl.create_default_context(cadata="".join(each.pem.decode() for each in authorities))
    context.check_hostname = True
    return context


def served_from(directory: Path) -> Certificate:
    return Certificate(directory, "webhook", CollectorRegistry())


def test_missing_halves_and_strangers_are_refused_and_the_old_one_stays(tmp_path: Path) -> None:
    """No file, garbage, or a key that fits another certificate: what serves goes on serving."""
    certificate, authority = served_from(tmp_path), Authority()
    certificate.reload()
    assert certificate.loaded is None
    first, second = authority.issue(), authority.issue()
    put(tmp_path, first)
    certificate.reload()
    loaded = certificate.loaded
    assert loaded is not None
    (tmp_path / "tls.key").write_bytes(second.key)
    certificate.reload()
    (tmp_path / "tls.crt").write_bytes(second.certificate[:100])
    certificate.reload()
    assert certificate.loaded is loaded
    assert certificate._loads.labels("failed")._value.get() == 3
    put(tmp_path, second)
    certificate.reload()
    assert certificate.loaded is not loaded


async def _serve(certificate: Certificate) -> asyncio.Server:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                writer.write(line)
                await writer.drain()
        finally:
            writer.close()

    return await asyncio.start_server(echo, "127.0.0.1", 0, ssl=certificate.front)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_new_connections_get_the_new_certificate_and_old_ones_live_on(tmp_path: Path, name: str) -> None:
    """Clients with and without a server name; an authority that is no longer used is no longer enough."""
    old, new = Authority("old"), Authority("new")

    async def scenario() -> None:
        certificate = served_from(tmp_path)
        server = await _serve(certificate)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((ssl.SSLError, ConnectionError)):  # none is loaded yet
            await asyncio.open_connection(name, port, ssl=trusting(old))
        put(tmp_path, old.issue())
        certificate.reload()
        reader, writer = await asyncio.open_connection(name, port, ssl=trusting(old))
        put(tmp_path, new.issue())
        certificate.reload()
        writer.write(b"still here\n")
        assert await reader.readline() == b"still here\n"
        writer.close()
        await writer.wait_closed()
        _, writer = await asyncio.open_connection(name, port, ssl=trusting(old, new))
        writer.close()
        await writer.wait_closed()
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection(name, port, ssl=trusting(old))
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())
