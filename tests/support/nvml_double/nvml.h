/* What the files of the double share: return codes, its state, and getters for simple answers.
 *
 * The number in API(since) and in the macros built on it is the driver branch that first exports
 * the function; __init__.py reads it from the source and hides the function from older drivers. */
#ifndef NVML_DOUBLE_H
#define NVML_DOUBLE_H

#include "scenario.h"

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    VERSION_MISMATCH = 25,
    DEPRECATED = 26,
};

typedef device *H;
typedef unsigned U;
typedef uint64_t U64;

#define API(since) __attribute__((visibility("default"))) int
#define ARGS(...) (int)(sizeof((U[]){__VA_ARGS__}) / sizeof(U)), (U[]){__VA_ARGS__}
#define VERSION(type, n) ((U)(sizeof(type) | (n) << 24))

extern device SYSTEM, gpus[MAX_GPUS], migs[MAX_GPUS][MAX_MIG];
extern int references; /* nvmlInit calls that were not shut down */
extern int gpu_count, branch, revision; /* driver 580.82.07 is branch 580, revision 82 */

void load(void);
int is_handle(H d);

/* As ask(), after the checks that every call makes. */
int get(H d, const char *function, int argc, const U *argv, answer *a);
int get_uint(H d, const char *function, int argc, const U *argv, U *out);
int get_u64(H d, const char *function, int argc, const U *argv, U64 *out);
int get_pair(H d, const char *function, U *first, U *second);
int get_text(H d, const char *function, int argc, const U *argv, char *out, U size);

typedef struct {
    char legacy[16];
    U domain, bus, slot, device_id, subsystem_id;
    char bus_id[32];
} pci_info;

int get_pci(H d, const char *key, int argc, const U *argv, pci_info *out);

/* nvmlDeviceGet<name>, by what it takes and gives */
#define UINT(since, name) \
    API(since) nvmlDeviceGet##name(H d, U *out) { return get_uint(d, #name, 0, NULL, out); }
#define UINT1(since, name) \
    API(since) nvmlDeviceGet##name(H d, U x, U *out) { return get_uint(d, #name, ARGS(x), out); }
#define ULL(since, name) \
    API(since) nvmlDeviceGet##name(H d, U64 *out) { return get_u64(d, #name, 0, NULL, out); }
#define ULL2(since, name) \
    API(since) nvmlDeviceGet##name(H d, U x, U y, U64 *out) { return get_u64(d, #name, ARGS(x, y), out); }
#define PAIR(since, name) \
    API(since) nvmlDeviceGet##name(H d, U *x, U *y) { return get_pair(d, #name, x, y); }
#define TEXT(since, name) \
    API(since) nvmlDeviceGet##name(H d, char *out, U size) { return get_text(d, #name, 0, NULL, out, size); }

#endif
