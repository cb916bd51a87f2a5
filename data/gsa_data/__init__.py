"""Stream blocks of tokens from shards of JSON lines or Parquet, in a fixed order that a resume continues exactly.

Read the files in this order: whole_files, faults, fetch, listing, unpack, parquet, copies, shards, documents, tokenize,
tokenizer_json, pack, source_weights, reader, marks, chat_template, chat, prepared, indexed, corpus,
content, stream_config, lanes, best_fit, rank_samples, stream, validation, ngram.
"""

__version__ = "0.1.0"
