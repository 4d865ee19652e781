/* All kernels as one file for the compiler. */

#include "correlate.c"
#include "lstm.c"
#include "narrow.c"
#include "rows.c"
