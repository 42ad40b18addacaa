"""The tracer of a run's spans: the program's own, or one that exports as OpenTelemetry's environment variables say.

Invariant: nothing is recorded unless the program or one of these variables asks for it, and no backend stops a run.
"""

import logging
import os
import sys
from importlib.metadata import entry_points, version
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

log = structlog.get_logger(__name__)

NAME = "rollgrad"
EXPORTERS = "opentelemetry_traces_exporter"
"""Entry points of OpenTelemetry's exporters of spans."""
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
"""Exporters of OTLP by its protocols."""


class FirstProblem(logging.Handler):
    """Tells of the first problem that OpenTelemetry has, and of no other: there is one for each batch of spans, and for
    each try to send it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._told = False

    def emit(self, record: logging.LogRecord) -> None:
        """Tells of a record."""
        if not self._told:
            self._told = True
            log.warning("spans are lost, or come late; the run goes on", reason=record.getMessage())


def tracer() -> "Tracer | None":
    """Returns the tracer of the program's OpenTelemetry, which is set up here if the environment names an exporter;
    None if nobody wants spans. What keeps spans from being exported is reported, and is no error."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporters = _exporters()
    if not exporters and "opentelemetry.trace" not in sys.modules:
        return None
    try:
        from opentelemetry import trace

        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            provider = _provider(exporters) if exporters else None
            if provider is None:
                return None
            trace.set_tracer_provider(provider)
            its_log = logging.getLogger("opentelemetry")
            its_log.addHandler(FirstProblem())
            its_log.propagate = False
    except ImportError as error:
        log.warning(
            "no spans are exported, as OpenTelemetry is not installed: pip install rollgrad[opentelemetry]",
            reason=str(error),
        )
        return None
    return trace.get_tracer(NAME, version(NAME))


def flush() -> None:
    """Exports the spans that have ended. Where nothing answers, it returns within the exporter's own deadline
    (OTEL_EXPORTER_OTLP_TIMEOUT, 10 s)."""
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if hasattr(provider, "force_flush"):  # of the SDK, not of the API alone
        provider.force_flush()


def _exporters() -> list[str]:
    """Returns the names of the exporters that the environment asks for."""
    listed = os.environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if not listed and any(os.environ.get(name) for name in ENDPOINTS):
        listed = "otlp"
    names = [name.strip() for name in listed.split(",")]
    return [name for name in names if name.lower() not in ("", "none")]


def _provider(exporters: list[str]) -> "TracerProvider | None":
    """Returns a provider with those exporters, which reads its other settings from the environment itself; None if no
    exporter can be made."""
    from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {} if SERVICE_NAME in OTELResourceDetector().detect().attributes else {SERVICE_NAME: NAME}
    provider = TracerProvider(resource=Resource.create(named))
    made = 0
    for name in exporters:
        found = entry_points(group=EXPORTERS, name=_entry_point(name))
        if not found:
            known = ", ".join(sorted({"otlp", *(each.name for each in entry_points(group=EXPORTERS))}))
            log.warning(f"no spans go to the exporter {name!r}: none of this name is installed", known=known)
            continue
        try:
            provider.add_span_processor(BatchSpanProcessor(next(iter(found)).load()()))
            made += 1
        except Exception as error:  # of any exporter: a package that lacks, an address that is none
            log.warning(f"no spans go to the exporter {name!r}", reason=f"{type(error).__name__}: {error}")
    return provider if made else None


def _entry_point(exporter: str) -> str:
    """Returns the name of the entry point of an exporter, of which `otlp` stands for that of its protocol."""
    if exporter != "otlp":
        return exporter
    protocol = next((os.environ[name] for name in PROTOCOLS if os.environ.get(name)), "grpc")
    return OTLP.get(protocol.strip(), f"otlp of the protocol {protocol}")
