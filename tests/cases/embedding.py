"""Cases for embeddings and their gradients."""

from isthmus._graph.names import aten
from tests.support import bf16, case, f32, f64, fails, i32, i64, values

ROWS = values([[1, 2, 2], [0, 4, 2]])

CASES = [
    case(aten.embedding.default, f32(5, 3), ROWS),
    case(
        aten.embedding.default, f32(3, 5).then(lambda t: t.t()), i32(2, 3).between(0, 4), 2, id="transposed"
    ),
    case(aten.embedding.default, bf16(5, 3), i64(0), id="empty"),
    fails(
        aten.embedding.default,
        f32(5, 3),
        values([1, 5]),
        error=IndexError,
        match="index out of range in self",
    ),
    fails(
        aten.embedding.default, f32(5, 3), values([-1]), error=IndexError, match="index out of range in self"
    ),
    case(aten.embedding_dense_backward.default, f32(2, 3, 4), ROWS, 5, -1, False),
    case(aten.embedding_dense_backward.default, f32(2, 3, 4), ROWS, 5, 2, False, id="padding"),
    case(aten.embedding_dense_backward.default, f32(2, 3, 4), ROWS, 5, -1, True, id="by frequency"),
    case(aten.embedding_dense_backward.default, bf16(2, 3, 4), values([[1, 2, 3], [0, 4, 5]]), 6, -1, False),
    case(aten.embedding_renorm_.default, f32(5, 3), values([1, 2, 2]), 1.5, 2.0),
    case(aten.embedding_renorm_.default, f64(5, 3), values([0]), 1.5, 1.0),
]
