"""The rows of a Parquet shard, through pyarrow (the extra `parquet`)."""

from __future__ import annotations

from typing import Any

from gsa_data.faults import DataFault

SOURCE_COLUMN = "meta.redpajama_set_name"  # as SlimPajama has it


def require_pyarrow(shard: str) -> Any:
    """The module pyarrow, or DataFault with the command that installs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataFault(
            f"shard {shard} needs pyarrow; run in the checkout: pip install '.[parquet]'"
        ) from error
    return pyarrow


def has_no_rows(packed: bytes, shard: str) -> bool:
    """Whether a shard is whole, and empty."""
    arrow = require_pyarrow(shard)
    try:
        return int(arrow.parquet.read_metadata(arrow.BufferReader(packed)).num_rows) == 0
    except (arrow.ArrowException, OSError):
        return False


def parquet_rows(
    packed: bytes, text_column: str, shard: str
) -> tuple[list[tuple[bytes | None, bytes | None]], str]:
    """Text and source of every row in file order, and what is wrong with the shard ("" when nothing is).

    The row groups before a damaged one are kept. Bytes, not strings: Parquet does not promise UTF-8.
    """
    arrow = require_pyarrow(shard)
    rows: list[tuple[bytes | None, bytes | None]] = []
    try:
        file = arrow.parquet.ParquetFile(arrow.BufferReader(packed), page_checksum_verification=True)
        columns = file.schema.names
        if file.schema_arrow.names.count(text_column) > 1:
            return [], f"has several columns {text_column!r}"
        if text_column not in file.schema_arrow.names:
            return [], f"has no column {text_column!r} (its columns: {', '.join(file.schema_arrow.names)})"
        kind = _value_type(file.schema_arrow.field(text_column).type, arrow)
        if kind not in (arrow.string(), arrow.large_string()):
            return [], f"holds {kind} in column {text_column!r}, not text"
        wanted = [text_column]
        if SOURCE_COLUMN in [file.schema.column(i).path for i in range(len(columns))]:
            wanted.append(SOURCE_COLUMN)
        for group in range(file.num_row_groups):
            # One thread: readers are processes already, and a forked pool of threads would wait for ever.
            table = file.read_row_group(group, columns=wanted, use_threads=False)
            texts = table.column(text_column).cast(arrow.large_binary()).to_pylist()
            sources = _sources(table, arrow) if len(wanted) > 1 else [None] * len(texts)
            rows += zip(texts, sources, strict=True)
    except (arrow.ArrowException, OSError) as error:
        return rows, f"is truncated or corrupt after {len(rows)} rows ({' '.join(str(error).split())[:200]})"
    return rows, ""


def chat_rows(packed: bytes, shard: str) -> tuple[list[dict[str, Any] | None], str]:
    """Of every row in file order the columns `messages`, `tools` and the source, as a line of JSON has them; None for
    one that is no UTF-8. And what is wrong with the shard, as `parquet_rows`."""
    arrow = require_pyarrow(shard)
    rows: list[dict[str, Any] | None] = []
    try:
        file = arrow.parquet.ParquetFile(arrow.BufferReader(packed), page_checksum_verification=True)
        columns = file.schema_arrow.names
        if columns.count("messages") != 1:
            return [], f"has not one column 'messages' (its columns: {', '.join(columns)})"
        wanted = [name for name in ("messages", "tools") if name in columns]
        paths = [file.schema.column(place).path for place in range(len(file.schema.names))]
        has_source = SOURCE_COLUMN in paths
        for group in range(file.num_row_groups):
            table = file.read_row_group(
                group, columns=[*wanted, *([SOURCE_COLUMN] if has_source else [])], use_threads=False
            )
            sources = _sources(table, arrow) if has_source else [None] * len(table)
            for place, source in enumerate(sources):
                meta = {"redpajama_set_name": source.decode(errors="replace") if source else None}
                try:
                    rows.append(
                        {**{name: table.column(name)[place].as_py() for name in wanted}, "meta": meta}
                    )
                except UnicodeDecodeError:
                    rows.append(None)
    except (arrow.ArrowException, OSError) as error:
        return rows, f"is truncated or corrupt after {len(rows)} rows ({' '.join(str(error).split())[:200]})"
    return rows, ""


def _sources(table: Any, arrow: Any) -> list[bytes | None]:
    """Of each row; None where it is not text, as in lines of JSON."""
    names = table.column_names
    if SOURCE_COLUMN in names:  # a column of its own, as pandas.json_normalize writes it
        column = table.column(names.index(SOURCE_COLUMN))
    else:
        column = table.column(names.index("meta")).combine_chunks().field("redpajama_set_name")
    text = (arrow.string(), arrow.large_string(), arrow.binary(), arrow.large_binary())
    if _value_type(column.type, arrow) not in text:
        return [None] * len(column)
    sources: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
    return sources


def _value_type(kind: Any, arrow: Any) -> Any:
    return kind.value_type if arrow.types.is_dictionary(kind) else kind
