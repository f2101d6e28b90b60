"""A report server for tests of the sidecar's client: a minimal HTTPS server that implements the contract."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

from deltashard_proto.v1 import fleet_pb2 as fleet

from tests.support.server.apiserver import CertificateAuthority, put
from tests.support.server.threaded_http import ThreadedHttp

__all__ = ["CertificateAuthority", "FleetServer"]


class FleetServer:
    """Records every report with the token `token` and answers as the controller does, unless configured otherwise."""

    def __init__(
        self, authority: CertificateAuthority, *, port: int = 0, token: str = "good", next_s: float = 0.2
    ) -> None:
        self.authority = authority
        self.token = token
        self.reply = fleet.ReportReply(next_s=next_s)
        """The answer's fields; a finished save request is removed, a directive already in force is omitted."""
        self.reject: Callable[[fleet.ReportRequest], int] = lambda _request: 0
        """Status of a refusal, or 0."""
        self.retry_after = ""
        self.tokens: list[str] = []
        """The token of every call, including refused ones."""
        self.reports: list[fleet.ReportRequest] = []
        self._http = ThreadedHttp(self._handler(), tls=self._context(), port=port)
        self.port = self._http.port

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            put(Path(folder), self.authority.issue())
            context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
        return context

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class FleetHandler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                status, answer = server._answer(token, fleet.ReportRequest.FromString(body), self.path)
                self.send_response(status)
                if status in {429, 503}:
                    self.send_header("Retry-After", server.retry_after)
                self.send_header("Content-Length", str(len(answer)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return FleetHandler

    def _answer(self, token: str, request: fleet.ReportRequest, path: str) -> tuple[int, bytes]:
        self.tokens.append(token)
        status = self.reject(request) or (0 if token == self.token else 401)
        if status or path != "/v1/report":
            return status or 404, b"refused by the test"
        self.reports.append(request)
        reply = fleet.ReportReply()
        reply.CopyFrom(self.reply)
        reply.sequence = request.sequence
        if reply.directive.id == request.pod.directive:
            reply.ClearField("directive")
        finished = {each.id for each in request.save_results}
        del reply.saves[:]
        reply.saves.extend(each for each in self.reply.saves if each.id not in finished)
        del self.reply.saves[:]
        self.reply.saves.extend(reply.saves)
        if request.incidents:
            reply.acknowledged_incident = max(each.id for each in request.incidents)
        return 200, reply.SerializeToString()

    def flags(self, tmp_path: Path) -> dict[str, Any]:
        """Return the flags of a sidecar that reports to this server; write its token to a file in `tmp_path`."""
        token = tmp_path / "token"
        token.write_text(self.token)
        return {"fleet": self.address, "fleet-ca": self.authority.pem.decode(), "fleet-token-file": token}

    def __enter__(self) -> Self:
        self._http.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.stop()

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def set_reply(self, **fields: Any) -> None:
        """Answer with these fields (next_s, speaks, directive, saves) from now on."""
        changed = fleet.ReportReply(**fields)
        for name in fields:
            self.reply.ClearField(name)
        self.reply.MergeFrom(changed)

    def incidents(self, kind: fleet.IncidentKind) -> list[fleet.Incident]:
        """Return every received incident of a kind, once each."""
        received = {i.id: i for report in list(self.reports) for i in report.incidents if i.kind == kind}
        return [received[key] for key in sorted(received)]

    @property
    def last(self) -> fleet.ReportRequest:
        return self.reports[-1] if self.reports else fleet.ReportRequest()
