from tests.sparse.test_dedup import make_column as column

from recd_plugins.sparse.partial import RowPacker


def unpack(packed, index):
    start = sum(packed.sizes[:index])
    values = packed.values[start : start + packed.sizes[index]]
    return [
        values[offset : offset + length].tolist()
        for offset, length in zip(packed.offsets[index], packed.lengths[index], strict=True)
    ]


def test_rows_that_share_less_than_those_of_the_last_batch_find_room():
    same = [[1, 2, 3]] * 100
    other = [[row, row + 1, row + 2, row] for row in range(100)]
    pack = RowPacker()
    for batch in ([same, same], [same, other], [other, other], [same, same], [[[]] * 100] * 2):
        packed = pack([column(rows) for rows in batch], 100)
        assert [unpack(packed, 0), unpack(packed, 1)] == batch


def test_a_batch_takes_little_more_memory_than_it_stores():
    pack = RowPacker()
    columns = [column([[1, 2, 3]] * 1000)]
    pack(columns, 1000)
    packed = pack(columns, 1000)
    assert packed.values.size == 3
    assert packed.values.base.size <= 4
