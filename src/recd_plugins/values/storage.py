"""How a store of files is reached, as options of datasets say it."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, field_validator


class Storage(BaseModel):
    """How an object store is reached. Who asks is for the environment to say, never for a file.

    Credentials of ``s3://`` are those of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with
    AWS_SESSION_TOKEN), of AWS_PROFILE and ``~/.aws``, or of the machine's role; those of ``gs://``
    Google's application default credentials.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="URL of an S3-compatible server, as http://host:9000; null is the provider's.",
    )
    region: str | None = Field(default=None, description="Region of the bucket.")
    anonymous: bool = Field(default=False, description="Send no credentials, for public data.")
    connect_timeout: PositiveFloat = Field(default=5, description="Seconds to reach the server.")
    request_timeout: PositiveFloat = Field(default=30, description="Seconds to wait for an answer.")
    attempts: PositiveInt = Field(default=3, description="Times that a request is sent at most.")

    @field_validator("endpoint")
    @classmethod
    def _is_a_server(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
        if "@" in endpoint:
            raise ValueError("holds a user or a password; credentials come from the environment")
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ValueError("is no server; write http://host:port")
        return f"{parts.scheme}://{parts.netloc}"
