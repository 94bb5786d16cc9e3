/* The decoder of speech as a library of its own, because few models need it: `compiled.py` says when it is made. */
#include "speech.h"
