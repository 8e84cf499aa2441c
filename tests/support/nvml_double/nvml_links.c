/* NVLink, fabric, C2C, MIG and the field values. */
#include "nvml.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* --- NVLink, fabric, C2C --- */

UINT1(0, NvLinkState)
UINT1(0, NvLinkVersion)
UINT1(0, NvLinkRemoteDeviceType)
API(0) nvmlDeviceGetNvLinkRemotePciInfo_v2(H d, U link, pci_info *out) {
    return get_pci(d, "NvLinkRemotePciInfo", ARGS(link), out);
}

API(0) nvmlDeviceGetNvLinkCapability(H d, U link, U capability, U *out) {
    return get_uint(d, "NvLinkCapability", ARGS(link, capability), out);
}

API(0) nvmlDeviceGetNvLinkErrorCounter(H d, U link, U counter, U64 *out) {
    return get_u64(d, "NvLinkErrorCounter", ARGS(link, counter), out);
}

API(545) nvmlDeviceGetC2cModeInfoV(H d, U *out) { return get_uint(d, "C2cModeInfo", 0, NULL, out); }

typedef struct { unsigned char uuid[16]; int status; U clique, state; } fabric_v1;
typedef struct { U version; unsigned char uuid[16]; int status; U clique, state, mask; } fabric_v2;
typedef struct {
    U version;
    unsigned char uuid[16];
    int status;
    U clique, state, mask;
    unsigned char summary;
} fabric_v3;

/* GpuFabricInfo = state status clique mask summary uuid(32 hex digits) */
static int get_fabric(H d, fabric_v3 *out) {
    answer a;
    char text[64];
    int code = get(d, "GpuFabricInfo", 0, NULL, &a);
    if (code) return code;
    out->state = number(&a, 0), out->status = number(&a, 1), out->clique = number(&a, 2);
    out->mask = number(&a, 3), out->summary = number(&a, 4);
    memset(out->uuid, 0, 16);
    if (token(&a, 5, text, sizeof text))
        for (int i = 0; i < 16; i++) sscanf(text + 2 * i, "%2hhx", &out->uuid[i]);
    return SUCCESS;
}

API(525) nvmlDeviceGetGpuFabricInfo(H d, fabric_v1 *out) {
    fabric_v3 full;
    int code = get_fabric(d, &full);
    if (code) return code;
    memcpy(out->uuid, full.uuid, 16);
    out->status = full.status, out->clique = full.clique, out->state = full.state;
    return SUCCESS;
}

API(550) nvmlDeviceGetGpuFabricInfoV(H d, fabric_v3 *out) {
    fabric_v3 full;
    int newest = branch >= 570 && out->version == VERSION(fabric_v3, 3);
    if (!newest && out->version != VERSION(fabric_v2, 2)) return VERSION_MISMATCH;
    int code = get_fabric(d, &full);
    if (code) return code;
    memcpy(out->uuid, full.uuid, 16);
    out->status = full.status, out->clique = full.clique, out->state = full.state, out->mask = full.mask;
    if (newest) out->summary = full.summary;
    return SUCCESS;
}

/* --- MIG --- */

PAIR(450, MigMode)
UINT(450, MaxMigDeviceCount)
UINT(450, GpuInstanceId)
UINT(450, ComputeInstanceId)

API(450) nvmlDeviceIsMigDeviceHandle(H d, U *out) {
    if (!references) return UNINITIALIZED;
    if (!is_handle(d)) return INVALID_ARGUMENT;
    *out = d->mig != NO_MIG;
    return SUCCESS;
}

API(450) nvmlDeviceGetMigDeviceHandleByIndex(H d, U index, H *out) {
    answer a;
    device mig = {d->index, index};
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || index >= MAX_MIG) return INVALID_ARGUMENT;
    int code = ask(&mig, "UUID", 0, NULL, &a);
    if (code) return code == NOT_SUPPORTED ? NOT_FOUND : code;
    *out = &migs[d->index][index];
    return SUCCESS;
}

API(450) nvmlDeviceGetDeviceHandleFromMigDeviceHandle(H d, H *out) {
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || d->mig == NO_MIG) return INVALID_ARGUMENT;
    *out = &gpus[d->index];
    return SUCCESS;
}

/* --- field values --- */

enum { DOUBLE, UINT_T, ULONG, ULLONG, SLLONG, SINT, USHORT };

typedef struct {
    U id, scope;
    int64_t timestamp, latency_us;
    int type, code;
    union {
        double d;
        U ui;
        unsigned long ul;
        U64 ull;
        int64_t sll;
        int si;
        unsigned short us;
    } value;
} field_value;

/* The same fact under its own function, so that a scenario states it once; -1 is the scope. */
static const struct { U id; const char *function; int argc, args[2], token; } SAME[] = {
    {1, "EccMode", 0, {0}, 0}, {2, "EccMode", 0, {0}, 1},
    {3, "TotalEccErrors", 2, {0, 0}, 0}, {4, "TotalEccErrors", 2, {1, 0}, 0},
    {5, "TotalEccErrors", 2, {0, 1}, 0}, {6, "TotalEccErrors", 2, {1, 1}, 0},
    {83, "TotalEnergyConsumption", 0, {0}, 0}, {94, "PcieReplayCounter", 0, {0}, 0},
    {142, "RemappedRows", 0, {0}, 0}, {143, "RemappedRows", 0, {0}, 1},
    {144, "RemappedRows", 0, {0}, 2}, {145, "RemappedRows", 0, {0}, 3},
    {161, "NvLinkErrorCounter", 2, {-1, 0}, 0}, {162, "NvLinkErrorCounter", 2, {-1, 1}, 0},
    {163, "NvLinkErrorCounter", 2, {-1, 2}, 0}, {165, "NvLinkState", 1, {-1}, 0},
    {166, "NvLinkVersion", 1, {-1}, 0}, {185, "PowerUsage", 0, {0}, 0},
    {186, "PowerUsage", 0, {0}, 0}, {187, "PowerManagementLimitConstraints", 0, {0}, 0},
    {188, "PowerManagementLimitConstraints", 0, {0}, 1},
    {189, "PowerManagementDefaultLimit", 0, {0}, 0}, {190, "EnforcedPowerLimit", 0, {0}, 0},
    {191, "TotalEnergyConsumption", 0, {0}, 0}, {192, "PowerManagementLimit", 0, {0}, 0},
};

/* The first driver branch that knows the field (the first CUDA header that names it). */
static int field_since(U id) {
    static const struct { U first; int branch; } SINCE[] = {
        {289, 610}, {272, 590}, {269, 580}, {251, 570}, {235, 560}, {231, 575}, {230, 570},
        {201, 560}, {197, 555}, {173, 535}, {169, 525}, {0, 0}};
    int i = 0;
    while (id < SINCE[i].first) i++;
    return SINCE[i].branch;
}

/* The three newest event reason counters moved from 251..253 to 269..271 with 580.82. */
static int moved(void) { return branch > 580 || (branch == 580 && revision >= 82); }

static const char *renumbered(U id) {
    static const char *const NAMES[] = {"field.sw_thermal", "field.hw_thermal",
                                        "field.hw_power_brake"};
    U first = moved() ? 269 : branch >= 575 ? 251 : UINT32_MAX - 3;
    return id >= first && id < first + 3 ? NAMES[id - first] : NULL;
}

static int default_type(U id) {
    if (id >= 193 && id <= 196) return SINT;
    if (id == 1 || id == 2 || id == 82 || id == 91 || id == 147 || (id >= 142 && id <= 145)) return UINT_T;
    if (id == 94 || id == 95 || (id >= 164 && id <= 192 && id != 191) || id == 230) return UINT_T;
    return ULLONG;
}

static int ask_field(H d, U id, U scope, answer *a, int *which) {
    U args[2] = {id, scope};
    const char *name = renumbered(id);
    *which = 0;
    if (field_since(id) > branch || (id >= 269 && !moved())) return INVALID_ARGUMENT;
    if (name) return ask(d, name, 0, NULL, a);
    if (!knows(d, "field", 2, args))
        for (size_t i = 0; i < sizeof SAME / sizeof *SAME; i++)
            if (SAME[i].id == id) {
                U same[2];
                for (int j = 0; j < 2; j++)
                    same[j] = SAME[i].args[j] < 0 ? scope : (U)SAME[i].args[j];
                *which = SAME[i].token;
                return ask(d, SAME[i].function, SAME[i].argc, same, a);
            }
    return ask(d, "field", 2, args, a);
}

static void read_field(H d, field_value *f) {
    static const char *const TYPES[] = {"double", "uint", "ulong", "ull", "sll", "int", "ushort"};
    answer a;
    int which;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    f->timestamp = t.tv_sec * 1000000LL + t.tv_nsec / 1000;
    f->latency_us = 3;
    memset(&f->value, 0, sizeof f->value);
    f->code = ask_field(d, f->id, f->scope, &a, &which);
    if (f->code) return;
    char *colon = strchr(a.text, ':');
    f->type = default_type(f->id);
    for (int i = 0; colon && i <= USHORT; i++)
        if (!strncmp(a.text, TYPES[i], colon - a.text)) f->type = i;
    if (colon) memmove(a.text, colon + 1, strlen(colon));
    U64 value = f->type == DOUBLE ? 0 : number(&a, which);
    switch (f->type) {
    case DOUBLE: f->value.d = real(&a, which); break;
    case UINT_T: f->value.ui = (U)value; break;
    case ULONG: f->value.ul = value; break;
    case SLLONG: f->value.sll = (int64_t)value; break;
    case SINT: f->value.si = (int)value; break;
    case USHORT: f->value.us = (unsigned short)value; break;
    default: f->value.ull = value;
    }
}

API(0) nvmlDeviceGetFieldValues(H d, int count, field_value *out) {
    answer a;
    if (!references) return UNINITIALIZED;
    if (!is_handle(d) || count < 1) return INVALID_ARGUMENT;
    int code = ask(d, "FieldValues", 0, NULL, &a);
    if (code && code != NOT_SUPPORTED) return code;
    for (int i = 0; i < count; i++) read_field(d, &out[i]);
    return SUCCESS;
}

/* ViolationStatus: types 0..5, 10, 11 are the fields 74..81 */
API(0) nvmlDeviceGetViolationStatus(H d, U type, U64 *out) {
    answer a;
    int which;
    struct timespec t;
    if (!references) return UNINITIALIZED;
    if (!is_handle(d)) return INVALID_ARGUMENT;
    U offset = type <= 5 ? type : type == 10 ? 6 : type == 11 ? 7 : 99;
    if (offset == 99) return INVALID_ARGUMENT;
    int code = ask_field(d, 74 + offset, 0, &a, &which);
    clock_gettime(CLOCK_REALTIME, &t);
    if (!code) out[0] = t.tv_sec * 1000000ULL + t.tv_nsec / 1000, out[1] = number(&a, which);
    return code;
}
