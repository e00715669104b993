"""From text to rows of token ids: sources, tokenizers, shards, preparation and the loader; imports no other folder."""
