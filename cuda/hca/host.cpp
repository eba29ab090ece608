// The engine for the thread beside the CPU.
#include "engine.h"

extern "C" uint32_t ossicle_hca_step(const ossicle::hca::Engine* engine) { return ossicle::hca::step(*engine); }
