"""Read the rows of a Parquet shard with pyarrow (the extra `parquet`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gsa_data.faults import DataFault
from gsa_data.unpack import LINE_BYTES, most_unpacked, too_large

SOURCE_COLUMN = "meta.redpajama_set_name"  # SlimPajama's field of the source
TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of text. The reader checks that each text is UTF-8."""
MOST_ROWS_AT_ONCE = 1 << 14


class TooLarge(ValueError):
    """A decompressed shard does not fit into memory."""


def require_pyarrow(shard: str) -> Any:
    """Import pyarrow, or raise DataFault with the command that installs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataFault(
            f"shard {shard} needs pyarrow; run in the checkout: pip install '.[parquet]'"
        ) from error
    return pyarrow


def has_no_rows(packed: bytes, shard: str) -> bool:
    """Returns whether a shard is intact and empty."""
    arrow = require_pyarrow(shard)
    try:
        return int(arrow.parquet.read_metadata(arrow.BufferReader(packed)).num_rows) == 0
    except (arrow.ArrowException, OSError):
        return False


def parquet_rows(
    packed: bytes, text_column: str, shard: str
) -> tuple[list[tuple[bytes | None, bytes | None]], str]:
    """Returns text and source of every row in file order, and the shard's damage ("" if it is intact).

    The row groups before a damaged group are kept. Text is bytes, because Parquet does not guarantee UTF-8.
    """
    arrow = require_pyarrow(shard)
    rows: list[tuple[bytes | None, bytes | None]] = []
    try:
        file = arrow.parquet.ParquetFile(arrow.BufferReader(packed), page_checksum_verification=True)
        if file.schema_arrow.names.count(text_column) > 1:
            return [], f"has several columns {text_column!r}"
        if text_column not in file.schema_arrow.names:
            return [], f"has no column {text_column!r} (its columns: {', '.join(file.schema_arrow.names)})"
        kind = _plain_type(file.schema_arrow.field(text_column).type, arrow)
        if str(kind) not in TEXT_TYPES:
            return [], f"holds {kind} in column {text_column!r}, not text"
        for tables in _row_groups(file, [text_column], len(packed), arrow):
            for table in tables:
                texts = table.column(text_column).cast(arrow.large_binary()).to_pylist()
                rows += zip(texts, _sources(table, arrow), strict=True)
    except TooLarge as error:
        return rows, str(error)
    except (arrow.ArrowException, OSError) as error:
        return rows, f"is truncated or corrupt after {len(rows)} rows ({' '.join(str(error).split())[:200]})"
    return rows, ""


def chat_rows(packed: bytes, shard: str) -> tuple[list[dict[str, Any] | None], str]:
    """Returns every row in file order, and the shard's damage ("" if the shard is intact). A row is a dictionary with
    `messages`, `tools` and the source, or None if the text is not UTF-8."""
    arrow = require_pyarrow(shard)
    rows: list[dict[str, Any] | None] = []
    try:
        file = arrow.parquet.ParquetFile(arrow.BufferReader(packed), page_checksum_verification=True)
        columns = file.schema_arrow.names
        if columns.count("messages") != 1:
            return [], f"has not one column 'messages' (its columns: {', '.join(columns)})"
        wanted = [name for name in ("messages", "tools") if name in columns]
        for tables in _row_groups(file, wanted, len(packed), arrow):
            for table in tables:
                for place, source in enumerate(_sources(table, arrow)):
                    meta = {"redpajama_set_name": source.decode(errors="replace") if source else None}
                    try:
                        found = {name: _decoded(table.column(name)[place].as_py()) for name in wanted}
                        rows.append({**found, "meta": meta})
                    except UnicodeDecodeError:
                        rows.append(None)
    except TooLarge as error:
        return rows, str(error)
    except (arrow.ArrowException, OSError) as error:
        return rows, f"is truncated or corrupt after {len(rows)} rows ({' '.join(str(error).split())[:200]})"
    return rows, ""


def _row_groups(file: Any, wanted: list[str], packed_bytes: int, arrow: Any) -> Iterator[list[Any]]:
    """Yields the tables of each row group, with the wanted columns and the source's column, as plain types.

    A Parquet dictionary column stores a repeated value only once, but in memory each row gets its own copy. The size
    in memory is therefore unknown before reading, so the rows are read in batches.

    Raises:
        TooLarge: the tables are larger than a shard may be in memory
    """
    paths = {file.schema.column(place).path for place in range(len(file.schema.names))}
    columns = [*wanted, *([SOURCE_COLUMN] if SOURCE_COLUMN in paths else [])]
    most, held = most_unpacked(packed_bytes), 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        parts = [metadata.column(place) for place in range(metadata.num_columns)]
        parts = [each for each in parts if each.path_in_schema.startswith(tuple(columns))]
        group_bytes = sum(each.total_uncompressed_size for each in parts)
        if group_bytes + LINE_BYTES * max((each.num_values for each in parts), default=0) > most:
            raise TooLarge(too_large(packed_bytes))
        tables = []
        # No value is larger than its column, so this number of rows fits into memory. Use one thread, because a reader
        # may be a forked process, in which Arrow's thread pool would wait forever.
        rows_at_once = max(1, min(MOST_ROWS_AT_ONCE, most // max(1, group_bytes)))
        for batch in file.iter_batches(rows_at_once, [group], columns, use_threads=False):
            table = arrow.Table.from_batches([batch])
            kinds = [(each.name, _plain_type(each.type, arrow)) for each in table.schema]
            table = table.cast(arrow.schema(kinds))
            held += table.nbytes + LINE_BYTES * len(table)
            if held > most:
                raise TooLarge(too_large(packed_bytes))
            tables.append(table)
        yield tables


def _sources(table: Any, arrow: Any) -> list[bytes | None]:
    """Returns the source of each row, or None if the source is not text."""
    names = table.column_names
    if SOURCE_COLUMN in names:  # pandas.json_normalize writes such a column
        column = table.column(names.index(SOURCE_COLUMN))
    elif "meta" in names:
        column = table.column(names.index("meta")).combine_chunks().field("redpajama_set_name")
    else:
        return [None] * len(table)
    if str(column.type) not in TEXT_TYPES:
        return [None] * len(column)
    sources: list[bytes | None] = column.cast(arrow.large_binary()).to_pylist()
    return sources


def _plain_type(kind: Any, arrow: Any) -> Any:
    """Replaces dictionary types (categories, enumerations) and extension types (JSON) by the type of their stored
    values, also inside structs and lists. Other types are returned unchanged."""
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _plain_type(kind.storage_type, arrow)
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type, arrow)
    if types.is_struct(kind):
        return arrow.struct([each.with_type(_plain_type(each.type, arrow)) for each in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        value = kind.value_field.with_type(_plain_type(kind.value_type, arrow))
        return arrow.list_(value) if types.is_list(kind) else arrow.large_list(value)
    return kind


def _decoded(value: Any) -> Any:
    """Returns the value with bytes decoded to text, because some programs write text as bytes."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict):
        return {name: _decoded(each) for name, each in value.items()}
    return value
