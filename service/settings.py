"""Every setting of the service, each also an environment variable that begins with NEARSENSE_."""

import ipaddress
import os
import re
from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "NEARSENSE_"
_KEY = re.compile(r"[!-~](?:[ -~]*[!-~])?")


class Settings(BaseSettings):
    """How the service runs. What is given by name wins over the environment.

    Raises:
        ValueError: A value breaks its rule, a variable NEARSENSE_… is none of these, or a host other than loopback is
            to be served without a key.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    model: Path | None = Field(None, description="Model directory; by default the one that is installed.")
    data: Path = Field(Path("nearsense-data"), description="Directory of what is stored; made if missing.")
    host: str = Field("127.0.0.1", description="Address to listen on; any but loopback needs an API key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    api_key: SecretStr | None = Field(None, min_length=16, description="Key that clients send as a bearer token.")
    threads: int = Field(os.cpu_count() or 1, ge=1, description="Processor threads for the model.")
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="Largest request body.")
    max_batch_tokens: int = Field(8192, ge=1, description="Largest batch; less if that is over 50 ms of work.")
    max_queue_tokens: int = Field(1_000_000, ge=1, description="Tokens that may wait; more are answered 429.")
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="Least level that is logged.")

    @model_validator(mode="after")
    def _check(self) -> "Settings":
        known = {PREFIX + name.upper() for name in type(self).model_fields}
        unknown = sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)
        if unknown:
            raise ValueError(f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key.get_secret_value()):
            raise ValueError(
                f"{PREFIX}API_KEY must be printable ASCII without spaces at its ends, or no client could send it"
            )
        if not self.on_loopback and self.api_key is None:
            raise ValueError(f"host must be a loopback address without a key, got {self.host}; set {PREFIX}API_KEY")
        return self

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
