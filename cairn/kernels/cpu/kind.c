/* The kernel of one type of weights as a library: compiled with -DKIND=Q4_0, or any other name that `slot_of` knows. */
#include <math.h>

#include "dot512.h"
#include "dot_neon.h"

int cairn_slot(void) { return slot_of(KIND); }

void cairn_rows_dot(Weights first, int64_t row_bytes, int count, const Quad *x, int rows, int columns, float *y) {
    rows_dot(KIND, first, row_bytes, count, x, rows, columns, y);
}
