"""The ways to compute one call. Each module has `refuses(call) -> str | None` and `run(call) -> (out, lse)`."""
