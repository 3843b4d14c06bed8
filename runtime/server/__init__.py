"""The OpenAI-compatible server. Nothing is imported here: `served` is needed without the server's packages, `app` needs them."""
