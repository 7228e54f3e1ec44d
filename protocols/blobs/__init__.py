"""Large data by name, in chunks with digests: `serving` offers it, `download` fetches it from several holders."""
