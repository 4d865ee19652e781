/* All kernels as one file for the compiler. */

#include "correlate.c"
#include "gather.c"
#include "grouped.c"
#include "gru.c"
#include "lstm.c"
#include "narrow.c"
#include "normalisation.c"
#include "rows.c"
