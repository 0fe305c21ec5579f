/* tower.h - names of the text model's tensors in a vision-language checkpoint. */
#ifndef PS_IO_TOWER_H
#define PS_IO_TOWER_H
#include <penstock/tensors.h>
#include <stdbool.h>

enum { PS__NAMES_PLAIN, PS__NAMES_OLD, PS__NAMES_NEW };
enum { PS__TOWER_PREFIX_BYTES = 24 }; /* what a layout adds to a name, at most */

/* ps__tensors_rename() - gives tensors the names that the text model has alone, and notes the
 * layout; by_name is then to be made anew. Errors: PS_ENOMEM.
 * ps__tensors_names() - the layout of the names in the files.
 * ps__name_is_of_text() - whether a text model may have a tensor of this name, or its adapter.
 * ps__name_on_disk() - the text model's @name, with PEFT's prefix or without, in a layout. */
ps_status ps__tensors_rename(ps_tensor_file *f);
uint32_t ps__tensors_names(const ps_tensor_file *f);
bool ps__name_is_of_text(const char *name);
void ps__name_on_disk(char *out, size_t bytes, uint32_t layout, const char *name);
#endif
