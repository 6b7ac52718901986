/* Functions for more instructions than the compiler's flags allow, and which instructions this processor has. */

#if defined(__clang__)
#define KNOWS(gcc, clang) (__clang_major__ >= (clang))
#define BEGIN_TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#define WIDEST /* clang prefers the widest vectors by itself */
#define UNROLL(count) PRAGMA(clang loop unroll_count(count))
#else
#define KNOWS(gcc, clang) (__GNUC__ >= (gcc))
#define BEGIN_TARGET(features) PRAGMA(GCC push_options) PRAGMA(GCC target(features))
#define END_TARGET PRAGMA(GCC pop_options)
#define WIDEST ",prefer-vector-width=512"
#define UNROLL(count) PRAGMA(GCC unroll count)
#endif

#if VARIANTS
#include <cpuid.h>

enum { EAX, EBX, ECX, EDX };

/* Returns a bit of a register of CPUID. The compilers' own __builtin_cpu_supports calls a library that not all of them have. */
static int cpuid_bit(unsigned leaf, unsigned part, int name, int bit) {
  unsigned registers[4];
  return __get_cpuid_count(leaf, part, registers, registers + 1, registers + 2, registers + 3) && registers[name] >> bit & 1;
}

/* Returns 1 if the system saves these registers when it switches between threads. */
static int saves_registers(unsigned mask) {
  unsigned low, high;
  if (!cpuid_bit(1, 0, ECX, 27)) return 0; /* OSXSAVE */
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & mask) == mask;
}

static int has_avx2_and_fma(void) { return saves_registers(0x6) && cpuid_bit(7, 0, EBX, 5) && cpuid_bit(1, 0, ECX, 12); }

/* Returns 1 for the foundation and the instructions for bytes and words, for double words, and for narrower vectors. */
static int has_avx512(void) {
#if !defined(__APPLE__) /* which saves these registers from their first use on */
  if (!saves_registers(0xe6)) return 0;
#endif
  return cpuid_bit(7, 0, EBX, 16) && cpuid_bit(7, 0, EBX, 17) && cpuid_bit(7, 0, EBX, 30) && cpuid_bit(7, 0, EBX, 31);
}

static int has_avx512_vnni(void) { return cpuid_bit(7, 0, ECX, 11); }

static int has_avx512_bf16(void) { return cpuid_bit(7, 1, EAX, 5); }

static int is_amd(void) {
  unsigned most, name[3];
  return __get_cpuid(0, &most, name, name + 2, name + 1) && memcmp(name, "AuthenticAMD", sizeof name) == 0;
}
#endif
