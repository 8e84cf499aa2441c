/* Load, memory, processes, PCIe, memory errors. */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* --- load, memory, processes --- */

typedef struct { U gpu, memory; } utilization;

API(0) nvmlDeviceGetUtilizationRates(H d, utilization *out) {
    return get_pair(d, "UtilizationRates", &out->gpu, &out->memory);
}

PAIR(0, EncoderUtilization)
PAIR(0, DecoderUtilization)

/* No samples since the time asked for: an idle process list, as far as callers can tell. */
API(0) nvmlDeviceGetProcessUtilization(H d, void *samples, U *count, U64 since) {
    answer a;
    (void)samples, (void)since;
    int code = get(d, "ProcessUtilization", 0, NULL, &a);
    *count = 0;
    return code == NOT_SUPPORTED ? NOT_FOUND : code;
}

/* MemoryInfo = total reserved used */
API(0) nvmlDeviceGetMemoryInfo(H d, U64 *out) {
    answer a;
    int code = get(d, "MemoryInfo", 0, NULL, &a);
    if (code) return code;
    out[0] = number(&a, 0), out[2] = number(&a, 1) + number(&a, 2), out[1] = out[0] - out[2];
    return SUCCESS;
}

typedef struct { U version; U64 total, reserved, free, used; } memory_info;
API(510) nvmlDeviceGetMemoryInfo_v2(H d, memory_info *out) {
    answer a;
    if (out->version != VERSION(*out, 2)) return VERSION_MISMATCH;
    int code = get(d, "MemoryInfo", 0, NULL, &a);
    if (code) return code;
    out->total = number(&a, 0), out->reserved = number(&a, 1), out->used = number(&a, 2);
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

/* BAR1MemoryInfo = total used */
API(0) nvmlDeviceGetBAR1MemoryInfo(H d, U64 *out) {
    answer a;
    int code = get(d, "BAR1MemoryInfo", 0, NULL, &a);
    if (!code) out[0] = number(&a, 0), out[2] = number(&a, 1), out[1] = out[0] - out[2];
    return code;
}

typedef struct { U pid; U64 memory; U gi, ci; } process;
typedef struct { U pid; U64 memory; U gi, ci; U64 protected_memory; } process_detail;

/* "pid:memory[:gi:ci]" */
static process parse_process(const answer *a, int which) {
    char text[64], *save;
    process p = {0, UINT64_MAX, UINT32_MAX, UINT32_MAX};
    token(a, which, text, sizeof text);
    char *part = strtok_r(text, ":", &save);
    if (part) p.pid = strtoul(part, NULL, 10);
    if ((part = strtok_r(NULL, ":", &save))) {
        answer memory = {.calls = a->calls};
        snprintf(memory.text, sizeof memory.text, "%s", part);
        p.memory = number(&memory, 0);
    }
    if ((part = strtok_r(NULL, ":", &save))) p.gi = strtoul(part, NULL, 10);
    if ((part = strtok_r(NULL, ":", &save))) p.ci = strtoul(part, NULL, 10);
    return p;
}

static int get_processes(H d, const char *key, U *count, process *out) {
    answer a;
    char text[64];
    int code = get(d, key, 0, NULL, &a);
    if (code) return code;
    U have = 0;
    while (strcmp(a.text, "none") && token(&a, have, text, sizeof text)) have++;
    U room = *count;
    *count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++) out[i] = parse_process(&a, i);
    return SUCCESS;
}

#define PROCESSES(since, name, suffix) \
    API(since) nvmlDeviceGet##name##suffix(H d, U *count, process *out) { return get_processes(d, #name, count, out); }
PROCESSES(0, ComputeRunningProcesses, _v2)
PROCESSES(510, ComputeRunningProcesses, _v3)
PROCESSES(0, GraphicsRunningProcesses, _v2)
PROCESSES(510, GraphicsRunningProcesses, _v3)
PROCESSES(0, MPSComputeRunningProcesses, _v2)
PROCESSES(510, MPSComputeRunningProcesses, _v3)

typedef struct { U version, mode, count; process_detail *out; } running_process_detail_list;
API(535) nvmlDeviceGetRunningProcessDetailList(H d, running_process_detail_list *list) {
    static const char *const KEYS[] = {"ComputeRunningProcesses", "GraphicsRunningProcesses",
                                       "MPSComputeRunningProcesses"};
    process found[64];
    U have = 64;
    if (list->version != VERSION(*list, 1)) return VERSION_MISMATCH;
    if (list->mode > 2) return INVALID_ARGUMENT;
    int code = get_processes(d, KEYS[list->mode], &have, found);
    if (code) return code;
    U room = list->count;
    list->count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++)
        list->out[i] = (process_detail){found[i].pid, found[i].memory, found[i].gi, found[i].ci,
                                        UINT64_MAX};
    return SUCCESS;
}

/* --- PCIe --- */

UINT(0, CurrPcieLinkGeneration)
UINT(0, CurrPcieLinkWidth)
UINT(0, MaxPcieLinkGeneration)
UINT(0, MaxPcieLinkWidth)
UINT(525, GpuMaxPcieLinkGeneration)
UINT(515, PcieSpeed)
UINT(510, PcieLinkMaxSpeed)
UINT(0, PcieReplayCounter)
API(0) nvmlDeviceGetPcieThroughput(H d, U counter, U *out) {
    nanosleep(&(struct timespec){0, 20000000}, NULL); /* the real one samples for 20 ms */
    return get_uint(d, "PcieThroughput", ARGS(counter), out);
}

/* --- memory errors --- */

ULL2(0, TotalEccErrors)
API(0) nvmlDeviceGetMemoryErrorCounter(H d, U type, U counter, U location, U64 *out) {
    return get_u64(d, "MemoryErrorCounter", ARGS(type, counter, location), out);
}

/* SramEccErrorStatus = the members in the order of the struct, the threshold flag last */
typedef struct { U version; U64 counters[11]; U threshold; } sram_ecc_error_status;
API(535) nvmlDeviceGetSramEccErrorStatus(H d, sram_ecc_error_status *out) {
    answer a;
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    int code = get(d, "SramEccErrorStatus", 0, NULL, &a);
    if (code) return code;
    for (int i = 0; i < 11; i++) out->counters[i] = number(&a, i);
    out->threshold = (U)number(&a, 11);
    return SUCCESS;
}

/* RemappedRows = correctable uncorrectable pending failure */
API(450) nvmlDeviceGetRemappedRows(H d, U *cor, U *unc, U *pending, U *failure) {
    answer a;
    int code = get(d, "RemappedRows", 0, NULL, &a);
    if (code) return code;
    *cor = number(&a, 0), *unc = number(&a, 1);
    *pending = number(&a, 2), *failure = number(&a, 3);
    return SUCCESS;
}

/* RowRemapperHistogram = max high partial low none */
API(460) nvmlDeviceGetRowRemapperHistogram(H d, U *out) {
    answer a;
    int code = get(d, "RowRemapperHistogram", 0, NULL, &a);
    for (int i = 0; !code && i < 5; i++) out[i] = number(&a, i);
    return code;
}

/* RetiredPages.<cause> = addresses, or "none" */
static int get_retired(H d, U cause, U *count, U64 *pages, U64 *times) {
    answer a;
    char text[64];
    int code = get(d, "RetiredPages", ARGS(cause), &a);
    if (code) return code;
    U have = 0, room = *count;
    while (strcmp(a.text, "none") && token(&a, have, text, sizeof text)) have++;
    *count = have;
    if (have > room) return INSUFFICIENT_SIZE;
    for (U i = 0; i < have; i++) {
        pages[i] = number(&a, i);
        if (times) times[i] = 1700000000u + i;
    }
    return SUCCESS;
}

API(0) nvmlDeviceGetRetiredPages(H d, U cause, U *count, U64 *pages) {
    return get_retired(d, cause, count, pages, NULL);
}

API(0) nvmlDeviceGetRetiredPages_v2(H d, U cause, U *count, U64 *pages, U64 *times) {
    return get_retired(d, cause, count, pages, times);
}

UINT(0, RetiredPagesPendingStatus)
typedef struct { U version, channel, tpc; } repair_status;
API(580) nvmlDeviceGetRepairStatus(H d, repair_status *out) {
    answer a;
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    int code = get(d, "RepairStatus", 0, NULL, &a);
    if (!code) out->channel = number(&a, 0), out->tpc = number(&a, 1);
    return code;
}
typedef struct { U version, flag; } unrepairable_memory_flag;
API(590) nvmlDeviceGetUnrepairableMemoryFlag_v1(H d, unrepairable_memory_flag *out) {
    if (out->version != VERSION(*out, 1)) return VERSION_MISMATCH;
    return get_uint(d, "UnrepairableMemoryFlag", 0, NULL, &out->flag);
}
